"""vgg9: six 3x3 convolutions and two hidden layers before the classifier, as in FedRCL's code."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from contrafed.core.layers import HalvingPool, group_norm
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, hidden_layers, projector_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build convolutions of 32, 64, 128, 128, 256 and 256 channels with a pool after every second, then the hidden layers.

    GroupNorm and ReLU follow each convolution, and a level follows these and the pool. Weights of convolutions are normal with
    std sqrt(2 / (9 output channels)).
    """
    stages: list[nn.Module] = []
    before = in_channels
    for number, after in enumerate((32, 64, 128, 128, 256, 256)):
        conv = nn.Conv2d(before, after, 3, 1, 1)
        nn.init.normal_(conv.weight, std=(2 / (9 * after)) ** 0.5)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        pool = [HalvingPool()] if number % 2 else []
        stages.append(nn.Sequential(conv, group_norm(after, config.groups), nn.ReLU(), *pool))
        before = after
    tails: list[nn.Module] = [nn.Identity() for _ in stages]
    width = hidden_layers(stages, tails, config.hidden, in_channels, image_size)
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
