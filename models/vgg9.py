"""vgg9: six 3x3 convolutions and two hidden layers before the classifier."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from core.config import Range
from models.base import SplitModel, Stages, hidden_layers, projector_of, relu_pool


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Encoder: three stages of two convolutions (32-64, 128-128, 256-256), each with a pool, then the hidden layers."""
    stages: list[nn.Module] = []
    tails: list[nn.Module] = []
    before = in_channels
    for middle, after in ((32, 64), (128, 128), (256, 256)):
        stages.append(nn.Sequential(nn.Conv2d(before, middle, 3, 1, 1), nn.ReLU(), nn.Conv2d(middle, after, 3, 1, 1)))
        tails.append(relu_pool())
        before = after
    width = hidden_layers(stages, tails, config.hidden, in_channels, image_size)
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
