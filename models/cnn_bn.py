"""cnn_bn: FedBN's network for digits, three convolutions and two hidden layers, each with BatchNorm."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from contrafed.core.errors import UserError
from contrafed.core.layers import relu_pool
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, features_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    channels: tuple[Annotated[int, Range(ge=1)], ...]
    kernel: Annotated[int, Range(ge=1)]
    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    momentum: Annotated[float, Range(gt=0, le=1)] | None

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no convolution."""
        if not self.channels:
            raise UserError("model.channels: empty. Fix: at least one convolution, or model=mlp")


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Encoder: convolutions that keep the image's size, with a 2x2 pool behind all but the last, then the hidden layers.

    Each is followed by BatchNorm and ReLU. There is no projector. Source: Li et al. 2021 (FedBN), Table 5 in the appendix.
    """
    stages: list[nn.Module] = []
    tails: list[nn.Module] = []
    width = in_channels
    for number, channels in enumerate(config.channels, start=1):
        conv = nn.Conv2d(width, channels, config.kernel, padding=config.kernel // 2)
        stages.append(nn.Sequential(conv, nn.BatchNorm2d(channels, momentum=config.momentum)))
        tails.append(nn.ReLU() if number == len(config.channels) else relu_pool())
        width = channels
    tails[-1] = nn.Sequential(tails[-1], nn.Flatten())
    width = features_of(Stages(stages, tails), in_channels, image_size)
    for size in config.hidden:
        stages.append(nn.Sequential(nn.Linear(width, size), nn.BatchNorm1d(size, momentum=config.momentum)))
        tails.append(nn.ReLU())
        width = size
    return SplitModel(Stages(stages, tails), nn.Identity(), nn.Linear(width, num_classes))
