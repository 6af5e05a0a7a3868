"""Layers that drop at random, with draws that come from outside: a function of the seed, equal in every engine and stack."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

NETWORK = "network"  # the entry of a batch's dropout with these numbers
NUMBERS = 2**24  # an example's number is below it, so that a float32 holds it
# Constants of the splitmix64 generator (Steele, Lea and Flood 2014), as signed numbers of 64 bits.
GOLDEN, FIRST, SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Drawn(nn.Module):
    """Dropout of single numbers, of channels, or of an example's whole branch (stochastic depth).

    With ``numbers`` (b,), one of each example, it drops in training. Without them it does nothing. What it drops of an example
    depends on that example's number alone.
    """

    numbers: Tensor | None = None

    def __init__(self, rate: float, place: int, kept_axes: int | None) -> None:
        """Build the layer.

        Args:
            rate: Probability to drop.
            place: The layer's number in its network, so that no two layers draw alike.
            kept_axes: Axes of an example with separate draws: None for all, 1 for channels, 0 for none.
        """
        super().__init__()
        self.rate, self.place, self.kept_axes = rate, place, kept_axes

    def forward(self, x: Tensor) -> Tensor:
        """Drop parts of x (b, ...), or of (n b, ...) where each example has n rows in succession."""
        if self.numbers is None or not self.rate:
            return x
        if self.rate == 1:
            return torch.zeros_like(x)
        rows, examples = len(x), len(self.numbers)
        if rows % examples:
            raise ValueError(f"dropout got {rows} rows of {examples} examples: it takes as many rows of each example")
        drawn = x.shape[1:] if self.kept_axes is None else x.shape[1 : 1 + self.kept_axes]
        shape = (*drawn, *[1] * (x.dim() - 1 - len(drawn)))
        uniform = draw_uniform(self.numbers, self.place, rows // examples * math.prod(shape)).to(x.dtype)
        return x * (uniform >= self.rate).to(x.dtype).reshape(rows, *shape) / (1 - self.rate)


def draw_uniform(numbers: Tensor, place: int, count: int) -> Tensor:
    """Return ``count`` uniform numbers in [0, 1) for each of ``numbers`` (b,), as (b, count) in float32."""
    return (_shift(draw_bits(numbers, place, count), 40)).float() / NUMBERS


def draw_bits(numbers: Tensor, place: int, count: int) -> Tensor:
    """Return ``count`` random numbers of 64 bits for each of ``numbers`` (b,), as (b, count) in int64.

    They are splitmix64's output at (number, place, position). Whole numbers give equal bits everywhere, also under ``vmap``,
    which torch's own generators do not.
    """
    position = torch.arange(count, device=numbers.device)
    mixed = (numbers.long().unsqueeze(1) * 4096 + place) * GOLDEN
    return _mix(_mix(mixed) + (position + 1) * GOLDEN)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * FIRST
    z = (z ^ _shift(z, 27)) * SECOND
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift numbers of 64 bits to the right, with zeros from the left."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def replace_drawing(network: nn.Module) -> None:
    """Replace the layers of dropout and stochastic depth of a network by ``Drawn`` ones, in place."""
    found = [(name, layer) for name, layer in network.named_modules() if name and _rate_of(layer) is not None]
    for place, (name, layer) in enumerate(found):
        rate = _rate_of(layer)
        assert rate is not None
        element = type(layer) is nn.Dropout
        channels = isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d)
        new = Drawn(rate, place, None if element else int(channels)) if rate else nn.Identity()
        network.set_submodule(name, new)


def _rate_of(layer: nn.Module) -> float | None:
    """Return the rate of a layer that only drops, None for another layer."""
    kind = type(layer).__name__
    if type(layer) in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d):
        return float(layer.p)  # type: ignore[arg-type]
    if kind == "StochasticDepth":  # torchvision's
        return float(layer.p)  # type: ignore[arg-type]
    if kind.endswith("DropPath"):  # timm's, and those of transformers
        return float(getattr(layer, "drop_prob", 0.0) or 0.0)
    return None


def drops(layer: nn.Module) -> bool:
    """Return whether a layer draws masks: a dropout layer, or torch's attention or recurrent layer with a dropout rate.

    Layers of an author are tried, because an attribute of this name need not be a rate that they use.
    """
    if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
        return layer.dropout > 0
    return isinstance(layer, _DropoutNd) and layer.p > 0


@contextlib.contextmanager
def drawing(layers: Sequence[Drawn], numbers: Tensor | None) -> Iterator[None]:
    """Have layers drop by the ``numbers`` (b, 1) of a batch's examples until the block ends."""
    for layer in layers:
        layer.numbers = None if numbers is None else numbers.reshape(-1)
    try:
        yield
    finally:
        for layer in layers:
            layer.numbers = None
