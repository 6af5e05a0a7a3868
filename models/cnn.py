"""cnn: two convolutions and one fully connected layer, FedCRL's network."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from contrafed.core.errors import UserError
from contrafed.core.layers import fitting_padding, relu_pool
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, hidden_layers, projector_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    channels: tuple[Annotated[int, Range(ge=1)], ...]
    kernel: Annotated[int, Range(ge=1)]
    padding: Annotated[int, Range(ge=0)]
    hidden: Annotated[int, Range(ge=1)]
    rep_relu: bool
    dropout: Annotated[float, Range(ge=0, lt=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no convolution."""
        if not self.channels:
            raise UserError("model.channels: empty. Fix: at least one convolution, or model=mlp")


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build convolution-ReLU-pool for each of ``channels``, then a layer of ``hidden`` units, with or without ReLU.

    Padding 0 gives FedCRL's counts on CIFAR-10: 258,624 shared parameters of 259,914. Images too small for ``padding`` get
    kernel // 2 instead.

    Interpretation: the sizes are this project's, as the paper prints none.

    Args:
        config: Settings of the model.
        in_channels: Channels of an image.
        image_size: Height and width in pixels.
        num_classes: Number of classes.

    Raises:
        UserError: If the image is too small for all pools.
    """
    padding = fitting_padding(image_size, config.kernel, len(config.channels), config.padding)
    stages: list[nn.Module] = []
    tails: list[nn.Module] = []
    channels = in_channels
    for width in config.channels:
        stages.append(nn.Conv2d(channels, width, config.kernel, padding=padding))
        tails.append(relu_pool())
        channels = width
    width = hidden_layers(stages, tails, (config.hidden,), in_channels, image_size)
    if not config.rep_relu:
        tails[-1] = nn.Identity()
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes), config.dropout)
