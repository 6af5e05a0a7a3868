"""cnn1d: convolutions along time, for signals of sensors."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, add_hidden, projector_of

INPUTS = ("values",)


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    channels: tuple[Annotated[int, Range(ge=1)], ...]
    kernel: Annotated[int, Range(ge=1)]
    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no convolution."""
        if not self.channels:
            raise UserError("model.channels: empty. Fix: at least one convolution, or model=mlp")


class AsImage(nn.Module):
    """Give signals (b, C, T) a height of one pixel. Images have pooled levels, and all methods take these."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, C, 1, T)."""
        return x.unsqueeze(-2)


def build(config: Config, in_channels: int, image_size: tuple[int, ...], num_classes: int) -> SplitModel:
    """Build convolution-ReLU-pool for each of ``channels``, then hidden layers with ReLU.

    Source: this project's design, from no paper.

    Args:
        config: Settings of the model.
        in_channels: Channels of a signal.
        image_size: Its number of time steps.
        num_classes: Number of classes.

    Raises:
        UserError: If an example is no signal (channels, steps), or too short for all pools.
    """
    if len(image_size) != 1:
        shape = "x".join(map(str, (in_channels, *image_size)))
        raise UserError(f"model=cnn1d takes signals of shape (channels, steps), got {shape}. Fix: model=mlp, or another shape")
    if image_size[0] < 2 ** len(config.channels):
        raise UserError(f"model.channels: {len(config.channels)} pools leave nothing of {image_size[0]} steps. Fix: name fewer")
    stages: list[nn.Module] = []
    tails: list[nn.Module] = []
    width = in_channels
    for channels in config.channels:
        stages.append(nn.Conv2d(width, channels, (1, config.kernel), padding="same"))
        tails.append(nn.Sequential(nn.MaxPool2d((1, 2)), nn.ReLU()))
        width = channels
    stages[0] = nn.Sequential(AsImage(), stages[0])
    tails[-1] = nn.Sequential(tails[-1], nn.Flatten())
    width = add_hidden(stages, tails, config.hidden, width * (image_size[0] // 2 ** len(config.channels)))
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
