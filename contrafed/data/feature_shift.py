"""Feature shift: each client's images are turned, lit, blurred or noisy in its own way."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from contrafed.core.drawn import draw_bits
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import OnlyWith, Range

LEVELS = 255.0
BLUR_RADIUS_DEVIATIONS = 3  # a Gaussian's weights end there
NOISE_PLACES = 4096  # of ``draw_bits``
UNIFORMS = 4  # whose sum stands for a normal number: bytes of one draw


@dataclass(frozen=True)
class FeatureShift:
    """Settings of the shift, in the group ``partition.feature_shift``."""

    kind: Literal["none", "rotation", "brightness", "blur", "noise"]
    degrees: Annotated[float, Range(ge=0, le=180), OnlyWith("kind", "rotation")]
    strength: Annotated[float, Range(ge=0), OnlyWith("kind", "brightness", "blur", "noise")]

    def __post_init__(self) -> None:
        if self.kind == "brightness" and self.strength > 1:
            raise UserError(
                f"partition.feature_shift.strength={self.strength:g}: a brightness would be multiplied by less than 0. "
                "Fix: at most 1"
            )


def draw_shifts(config: FeatureShift, num_clients: int, seed: int) -> np.ndarray:
    """Draw the shift of each client (K,), as a pure function of (seed, client).

    Args:
        config: Settings of the shift.
        num_clients: K.
        seed: The seed of the federation.

    Returns:
        Each client has its u ~ U(-1, 1). A rotation is by degrees u. A brightness is the factor 1 + strength u. Blur and noise
        have the standard deviation strength |u|, in pixels or as a share of the grey levels.
    """
    u = np.array([generator(seed, "feature shift", 0, client).uniform(-1, 1) for client in range(num_clients)])
    if config.kind == "rotation":
        return config.degrees * u
    return 1 + config.strength * u if config.kind == "brightness" else config.strength * np.abs(u)


class Shifter:
    """Shifts the images of marked positions. The stored images stay as they are, once for all clients."""

    def __init__(self, config: FeatureShift, shifts: np.ndarray, originals: Tensor, seed: int, device: torch.device) -> None:
        """Take the ``shifts`` (K,) of ``draw_shifts`` with their seed, and each position's (N,) original position."""
        self.noise_place = int(generator(seed, "feature noise").integers(NOISE_PLACES))
        self.kind, self.num_examples, self.originals = config.kind, len(originals), originals.to(device)
        self.num_originals = int(originals.max()) + 1
        self.radius = math.ceil(BLUR_RADIUS_DEVIATIONS * config.strength)
        unshifted = 1.0 if config.kind == "brightness" else 0.0  # of positions without a mark, such as the central test split
        self.shifts = torch.tensor([unshifted, *shifts.tolist()], dtype=torch.float32, device=device)

    def examples(self, index: Tensor) -> Tensor:
        """Return the positions (...) of examples in the data set, of marked positions (...)."""
        return index % self.num_examples

    def shift(self, images: Tensor, index: Tensor) -> Tensor:
        """Return shifted images, in whole grey levels, so that it does not matter how many are shifted together.

        Args:
            images: (n, H, W, C), values 0 to 255.
            index: Their marked positions (n,).

        Returns:
            (n, H, W, C), uint8.
        """
        x, client = images.float(), index // self.num_examples
        amount = self.shifts[client].view(-1, 1, 1, 1)
        if self.kind == "rotation":
            x = rotate(x, amount.deg2rad())
        elif self.kind == "brightness":
            x = x * amount
        elif self.kind == "blur":
            x = blur(x, amount, self.radius)
        elif self.kind == "noise":
            marked = self.originals[self.examples(index)] + client * self.num_originals
            x = x + amount * LEVELS * draw_noise(x, marked, self.noise_place)
        return x.clamp(0, LEVELS).round().to(torch.uint8)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate images (n, H, W, C) about their centre by ``angle`` (n, 1, 1, 1) in radians, bilinear, with a black border."""
    count, height, width, channels = x.shape
    row = torch.arange(height, device=x.device, dtype=x.dtype).view(1, -1, 1) - (height - 1) / 2
    column = torch.arange(width, device=x.device, dtype=x.dtype).view(1, 1, -1) - (width - 1) / 2
    cos, sin = angle.squeeze(-1).cos(), angle.squeeze(-1).sin()
    source_row = cos * row + sin * column + (height - 1) / 2
    source_column = cos * column - sin * row + (width - 1) / 2
    top, left, pixels, out = source_row.floor(), source_column.floor(), x.flatten(1, 2), torch.zeros_like(x)
    for down in (0, 1):
        for right in (0, 1):
            r, c = top + down, left + right
            weight = (1 - (source_row - r).abs()) * (1 - (source_column - c).abs())
            weight = weight * ((r >= 0) & (r < height) & (c >= 0) & (c < width))
            place = (r.clamp(0, height - 1) * width + c.clamp(0, width - 1)).long().view(count, -1, 1)
            out = out + weight.unsqueeze(-1) * pixels.gather(1, place.expand(-1, -1, channels)).view_as(x)
    return out


def blur(x: Tensor, deviation: Tensor, radius: int) -> Tensor:
    """Blur images (n, H, W, C) by a Gaussian of ``deviation`` (n, 1, 1, 1) pixels. The border is repeated outwards."""
    steps = torch.arange(-radius, radius + 1, device=x.device)
    weights = torch.exp(-(steps.to(x.dtype) ** 2) / (2 * deviation.view(-1, 1).clamp_min(1e-3) ** 2))
    weights = weights / weights.sum(1, keepdim=True)
    for axis in (1, 2):
        places = torch.arange(x.shape[axis], device=x.device)
        shifted = [x.index_select(axis, (places + step).clamp(0, len(places) - 1)) for step in steps.tolist()]
        x = sum((weights[:, i].view(-1, 1, 1, 1) * each for i, each in enumerate(shifted)), torch.zeros_like(x))
    return x


def draw_noise(x: Tensor, index: Tensor, place: int = 0) -> Tensor:
    """Return noise of mean 0 and deviation 1 for images (n, H, W, C), always the same for a marked position in ``index`` (n,).

    ``place``, from 0 to 4095, separates the noise of different seeds.

    The sum of four bytes of a draw for the position and the pixel is close to normal.
    """
    word = draw_bits(index, place, x[0].numel()).view(x.shape)
    total = sum(((word >> (8 * byte)) & 0xFF) for byte in range(UNIFORMS))
    deviation = math.sqrt(UNIFORMS * (256**2 - 1) / 12)
    noise: Tensor = (total.to(x.dtype) - UNIFORMS * 127.5) / deviation  # type: ignore[union-attr]
    return noise
