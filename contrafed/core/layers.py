"""Layers that several networks share: pools, paddings and group normalisation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contrafed.core.errors import UserError


class HalvingPool(nn.Module):
    """A 2x2 max-pool of stride 2 that drops an odd last row or column.

    On a CPU without a gradient it takes two maxima over slices. The numbers are the same, in 57 us instead of 148
    (docs/BENCHMARKS.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., C, H // 2, W // 2) for x (..., C, H, W)."""
        if torch.is_grad_enabled() or x.device.type != "cpu":
            return F.max_pool2d(x, 2)
        height, width = (side // 2 * 2 for side in x.shape[-2:])
        x = torch.maximum(x[..., 0:width:2], x[..., 1:width:2])
        return torch.maximum(x[..., 0:height:2, :], x[..., 1:height:2, :])


def relu_pool() -> nn.Module:
    """Return ReLU and a 2x2 max-pool, which follow a convolution in the small networks. Their order does not change the result.

    ReLU after the pool sees a quarter of the numbers. A pass of PMFL's CNN takes 1.2 instead of 1.6 ms (docs/BENCHMARKS.md).
    """
    return nn.Sequential(HalvingPool(), nn.ReLU())


def fitting_padding(image_size: tuple[int, int], kernel: int, layers: int, wanted: int = 0) -> int:
    """Return the padding of convolutions, each followed by a 2x2 pool: ``wanted`` if that leaves a pixel, else kernel // 2.

    kernel // 2 keeps the size for odd kernels.

    Raises:
        UserError: If kernel // 2 leaves no pixel either.
    """
    for padding in (wanted, kernel // 2):
        side = min(image_size)
        for _ in range(layers):
            side = max(side + 2 * padding - kernel + 1, 0) // 2
        if side >= 1:
            return padding
    raise UserError(
        f"model: {layers} convolutions of kernel {kernel}, each with a 2x2 pool, leave nothing of images of "
        f"{image_size[0]}x{image_size[1]}"
    )


class FullPrecisionGroupNorm(nn.GroupNorm):
    """A GroupNorm that computes in its weights' type under autocast.

    CUDA's does so for a single client, but not under ``vmap``.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (n, C, ...)."""
        out: Tensor = super().forward(x.to(self.weight.dtype))
        return out


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    """Return a GroupNorm whose number of groups is the greatest common divisor of ``groups`` and ``channels``."""
    return FullPrecisionGroupNorm(math.gcd(groups, channels), channels)
