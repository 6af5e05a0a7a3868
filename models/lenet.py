"""lenet: LeNet-5 with ReLU and max-pooling."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from contrafed.core.layers import fitting_padding, relu_pool
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, hidden_layers, projector_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build 5x5 convolutions of 6 and 16 channels with pools, then the hidden layers, with z after the last ReLU.

    Images too small for unpadded convolutions are padded to keep their size.
    """
    padding = fitting_padding(image_size, 5, 2)
    stages: list[nn.Module] = [nn.Conv2d(in_channels, 6, 5, padding=padding), nn.Conv2d(6, 16, 5, padding=padding)]
    tails = [relu_pool(), relu_pool()]
    width = hidden_layers(stages, tails, config.hidden, in_channels, image_size)
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
