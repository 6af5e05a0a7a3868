"""cnn5: MpFedcon's network, a five-layer CNN with a two-layer projection."""

from dataclasses import dataclass
from typing import Annotated

from torch import nn

from contrafed.core.layers import fitting_padding, relu_pool
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, hidden_layers, projector_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    channels: Annotated[int, Range(ge=1)]
    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build two 5x5 convolutions with pools and the hidden layers, each with ReLU, then projector and linear classifier.

    On CIFAR-10 encoder and classifier without the projector have 307,842 parameters. Class centres have the projector's width,
    256, and take 10 KiB. The paper's traffic implies these sizes. Images too small for unpadded convolutions are padded to keep
    their size.
    """
    padding = fitting_padding(image_size, 5, 2)
    stages: list[nn.Module] = [
        nn.Conv2d(in_channels, config.channels, 5, padding=padding),
        nn.Conv2d(config.channels, config.channels, 5, padding=padding),
    ]
    tails = [relu_pool(), relu_pool()]
    width = hidden_layers(stages, tails, config.hidden, in_channels, image_size)
    projector, width = projector_of(width, config.projection)
    return SplitModel(Stages(stages, tails), projector, nn.Linear(width, num_classes))
