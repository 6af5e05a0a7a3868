"""Augment training images with batched tensor code: colours (FedAU's CIFAR-100), rotation, crop and mirror."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from contrafed.core.randomness import torch_generator

# Largest rotation in degrees, either way. A crop is cut from a black border of 4 pixels on 32x32, and of at most an eighth of a
# side.
LARGEST_ANGLE, BORDER, SHARE = 10.0, 4, 8
# Changes of colour, in the order of their application. Jitter applies to all images, each of the others to a random half of
# them.
COLOURS = ("sharpness", "jitter", "posterize", "equalize")
JITTER_SHARE = 0.05  # of the brightness, as a factor, and of the hue, as a share of the colour circle, either way
POSTERIZED_LEVELS = 64  # levels of brightness that become one, so that two bits of eight are left
LEVELS = 256


def draw_augmentation(
    kinds: Sequence[str], side: int, count: int, seed: int, purpose: str, server_round: int, client: int
) -> Tensor:
    """Draw the changes of all examples that a client trains on in a round (``draw_uniform``, ``compute_changes``)."""
    return compute_changes(draw_uniform(kinds, count, seed, purpose, server_round, client), kinds, side)


def draw_uniform(kinds: Sequence[str], count: int, seed: int, purpose: str, server_round: int, client: int) -> Tensor:
    """Draw numbers between 0 and 1 for all examples that a client trains on in a round, in their order.

    Args:
        kinds: Names of the changes.
        count: Number of examples.
        seed: The run's seed.
        purpose: Purpose string of the batches' stream.
        server_round: The round.
        client: Partition id of the client.

    Returns:
        The numbers (count, 4), or (count, 10) with a change of colour.
    """
    uniform = torch.rand(count, 4, generator=torch_generator(seed, f"{purpose} augmentation", server_round, client))
    if not set(kinds) & set(COLOURS):
        return uniform
    more = torch.rand(count, 6, generator=torch_generator(seed, f"{purpose} colours", server_round, client))
    return torch.cat([uniform, more], dim=1)


def compute_changes(uniform: Tensor, kinds: Sequence[str], side: int) -> Tensor:
    """Return the changes of examples from their drawn numbers.

    A row has the angle in radians, the shifts of rows and columns in pixels, and 1 for a mirrored image. With a change of
    colour six more numbers follow: sharpened (1), factor of the brightness, shift of the hue, brightness before hue (1),
    posterised (1), equalised (1). Kinds that are not named change nothing.

    Args:
        uniform: The numbers (n, 4 or 10) of ``draw_uniform``, of any clients.
        kinds: Names of the changes.
        side: The shorter side of an image, in pixels.

    Returns:
        The changes (n, 4 or 10).
    """
    border = min(BORDER, side // SHARE)
    angle = (2 * uniform[:, 0] - 1) * math.radians(LARGEST_ANGLE) * ("rotation" in kinds)
    shift = ((uniform[:, 1:3] * (2 * border + 1)).floor() - border) * ("crop" in kinds)
    flip = (uniform[:, 3] < 0.5) * float("flip" in kinds)
    moves = torch.cat([angle.unsqueeze(1), shift, flip.unsqueeze(1)], dim=1)
    if uniform.shape[1] == 4:
        return moves
    uniform = uniform[:, 4:]
    half, jitter = (uniform < 0.5).float(), (2 * uniform - 1) * JITTER_SHARE * ("jitter" in kinds)
    columns = [
        half[:, 0] * ("sharpness" in kinds),
        1 + jitter[:, 1],
        jitter[:, 2],
        half[:, 3],
        half[:, 4] * ("posterize" in kinds),
        half[:, 5] * ("equalize" in kinds),
    ]
    return torch.cat([moves, torch.stack(columns, dim=1)], dim=1)


def augment_images(images: Tensor, change: Tensor) -> Tensor:
    """Change the colours of images, then move them.

    Args:
        images: (n, H, W, C), values 0 to 255.
        change: (n, 4 or 10), as ``draw_augmentation`` returns it.
    """
    moves, colours = change[:, :4], change[:, 4:]
    return move_images(change_colours(images, colours) if colours.shape[1] else images, moves)


def move_images(images: Tensor, change: Tensor) -> Tensor:
    """Rotate images about their centre, then crop them from a black border, then mirror them.

    Each pixel is the nearest source pixel, as in torchvision's random rotation by default. Crops and flips are exact.

    Args:
        images: (n, H, W, C).
        change: (n, 4): angle, rows, columns, mirrored.
    """
    count, height, width, _ = images.shape
    angle, down, right, flip = (column.view(-1, 1, 1) for column in change.unbind(1))
    row = torch.arange(height, device=images.device, dtype=change.dtype).view(1, -1, 1)
    column = torch.arange(width, device=images.device, dtype=change.dtype).view(1, 1, -1)
    # Backwards from a pixel of the result to its source.
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


def change_colours(images: Tensor, change: Tensor) -> Tensor:
    """Sharpen, jitter, posterise and equalise images.

    Every step ends in whole numbers, as torchvision's steps do on uint8. The computation is in float32 for every type of image.

    Args:
        images: (n, H, W, C), whole numbers 0 to 255.
        change: (n, 6): sharpened, brightness, hue, brightness first, posterised, equalised.
    """
    sharp, factor, shift, first, few, equal = (column.float().view(-1, 1, 1, 1) for column in change.unbind(1))
    x = images.float()
    x = torch.where(sharp > 0, sharpen(x), x)
    x = torch.where(first > 0, shift_hue(brighten(x, factor), shift), brighten(shift_hue(x, shift), factor))
    x = torch.where(few > 0, (x / POSTERIZED_LEVELS).floor() * POSTERIZED_LEVELS, x)
    return torch.where(equal > 0, equalise(x), x).to(images.dtype)


def sharpen(x: Tensor) -> Tensor:
    """Double the difference of images (n, H, W, C) from their smoothed versions. The outermost pixels stay."""
    rows = x[:, :-2] + x[:, 1:-1] + x[:, 2:]
    middle = x[:, 1:-1, 1:-1]
    smooth = ((rows[:, :, :-2] + rows[:, :, 1:-1] + rows[:, :, 2:] + 4 * middle) / 13).round()
    out = x.clone()
    out[:, 1:-1, 1:-1] = (2 * middle - smooth).clamp(0, LEVELS - 1)
    return out


def brighten(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply images (n, H, W, C) by each image's ``factor`` (n, 1, 1, 1)."""
    return (x * factor).clamp(0, LEVELS - 1).floor()


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hues of images (n, H, W, C) by a share of the circle ``shift`` (n, 1, 1, 1). Grey images stay."""
    if x.shape[-1] == 1:
        return x
    red, green, blue = (x / (LEVELS - 1)).split(1, dim=-1)
    least, value = torch.aminmax(x / (LEVELS - 1), dim=-1, keepdim=True)
    span = value - least
    safe = torch.where(span > 0, span, 1.0)
    of_blue = torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4)
    sixths = torch.where(value == red, (green - blue) / safe, of_blue) + 6 * shift
    # Each channel decreases from the value by the span, in the part of the circle opposite to it.
    place = (sixths + torch.tensor([5.0, 3.0, 1.0], device=x.device)).remainder(6)
    turned = value - span * torch.minimum(place, 4 - place).clamp(0, 1)
    return torch.where(shift == 0, x, (turned * (LEVELS - 1e-3)).floor())


def equalise(x: Tensor) -> Tensor:
    """Spread the levels of images (n, H, W, C), so that those of each channel are about equally frequent."""
    level = x.flatten(1, 2).long()  # (n, H W, C)
    counts = torch.zeros(len(x), LEVELS, x.shape[-1], dtype=torch.int64, device=x.device)
    counts.scatter_add_(1, level, torch.ones_like(level))
    highest = counts.gather(1, level.amax(1, keepdim=True))
    step = (level.shape[1] - highest) // (LEVELS - 1)  # pixels a level, except those of the highest level
    below = counts.cumsum(1) - counts
    new = ((below + step // 2) // step.clamp_min(1)).clamp(0, LEVELS - 1).gather(1, level)
    return torch.where(step > 0, new, level).view_as(x).to(x.dtype)
