"""Random rotation, crop and flip of training images, as batched tensor code (FedRCL: METHODS section 5)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from core.randomness import torch_generator

# Degrees either way, and pixels of black border that a crop is cut from: 4 on 32x32, and never more than an eighth of a side.
LARGEST_ANGLE, BORDER, SHARE = 10.0, 4, 8


def draw_augmentation(
    kinds: Sequence[str], side: int, count: int, seed: int, purpose: str, server_round: int, node: int
) -> Tensor:
    """Return (count, 4): angle in radians, rows and columns to shift by, and 1 for a mirrored image.

    For all examples that a node sees in a round, in the order it sees them; what ``kinds`` does not name is 0. ``side`` is the
    shorter one of an image, in pixels.
    """
    border = min(BORDER, side // SHARE)
    rng = torch_generator(seed, f"{purpose} augmentation", server_round, node)
    uniform = torch.rand(count, 4, generator=rng)
    angle = (2 * uniform[:, 0] - 1) * math.radians(LARGEST_ANGLE) * ("rotation" in kinds)
    shift = ((uniform[:, 1:3] * (2 * border + 1)).floor() - border) * ("crop" in kinds)
    flip = (uniform[:, 3] < 0.5) * float("flip" in kinds)
    return torch.cat([angle.unsqueeze(1), shift, flip.unsqueeze(1)], dim=1)


def augmented(images: Tensor, change: Tensor) -> Tensor:
    """Return images (n, H, W, C) rotated about their centre, then cropped from a black border, then mirrored.

    ``change`` (n, 4) is what ``draw_augmentation`` returns. Pixels are taken from the nearest one, as torchvision's random
    rotation does by default; crops and flips are exact.
    """
    count, height, width, _ = images.shape
    angle, down, right, flip = (column.view(-1, 1, 1) for column in change.unbind(1))
    row = torch.arange(height, device=images.device, dtype=change.dtype).view(1, -1, 1)
    column = torch.arange(width, device=images.device, dtype=change.dtype).view(1, 1, -1)
    # Backwards from a pixel of the result to where it comes from.
    column = torch.where(flip > 0, width - 1 - column, column) + right
    row = row + down
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    y, x = row - (height - 1) / 2, column - (width - 1) / 2
    source_row = (angle.cos() * y + angle.sin() * x + (height - 1) / 2).round().long()
    source_column = (angle.cos() * x - angle.sin() * y + (width - 1) / 2).round().long()
    inside = inside & (source_row >= 0) & (source_row < height) & (source_column >= 0) & (source_column < width)
    place = (source_row.clamp(0, height - 1) * width + source_column.clamp(0, width - 1)).view(count, -1, 1)
    pixels = images.flatten(1, 2).gather(1, place.expand(-1, -1, images.shape[-1]))
    return (pixels * inside.view(count, -1, 1)).view_as(images)
