"""cnn_pmfl: PMFL's network, two 3x3 convolutions and two or three fully connected layers."""

from dataclasses import dataclass
from typing import Annotated, cast

from torch import Tensor, nn

from contrafed.core.layers import relu_pool
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, Stages, features_of


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    channels: Annotated[int, Range(ge=1)]
    hidden: tuple[Annotated[int, Range(ge=1)], ...]
    dropout: Annotated[float, Range(ge=0, lt=1)]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build the convolutions as encoder, the hidden layers with ReLU as projector, and the last layer as classifier.

    z is the input of the last layer, after the ReLU. The paper shares its layer counts with the FedAU code, so initial weights
    and dropout follow that code. Weights of convolutions and hidden layers are Kaiming-normal, and their biases 0. Dropout
    precedes each hidden layer and the classifier.
    """
    first = nn.Conv2d(in_channels, config.channels, 3, padding=1)
    second = nn.Conv2d(config.channels, config.channels, 3, padding=1)
    encoder = Stages([first, second], [relu_pool(), nn.Sequential(relu_pool(), nn.Flatten())])
    width = features_of(encoder, in_channels, image_size)
    layers: list[nn.Module] = []
    for size in config.hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    for layer in (first, second, *layers):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(cast(Tensor, layer.bias))
    dropped = ("classifier", *(f"projector.{i}" for i in range(0, len(layers), 2)))
    return SplitModel(encoder, nn.Sequential(*layers), nn.Linear(width, num_classes), config.dropout, dropped)
