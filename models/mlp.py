"""mlp: fully connected layers with ReLU."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from torch import nn

from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, projector_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


INPUTS = ("image", "values")


def build(config: Config, in_channels: int, image_size: tuple[int, ...], num_classes: int) -> SplitModel:
    """Build the hidden layers, with z after the last ReLU.

    MpFedcon's base for FEMNIST has hidden layers [512, 256].
    """
    widths = (math.prod((in_channels, *image_size)), *config.hidden)
    layers: list[nn.Module] = [nn.Linear(a, b) for a, b in pairwise(widths)]
    if layers:
        layers[0] = nn.Sequential(nn.Flatten(), layers[0])
    encoder = Stages(layers or [nn.Flatten()], [nn.ReLU() for _ in layers] or [nn.Identity()])
    projector, width = projector_of(widths[-1], config.projection)
    return SplitModel(encoder, projector, nn.Linear(width, num_classes))
