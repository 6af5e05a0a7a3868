"""squeezenet: fire modules with GroupNorm and shortcuts, as in FedRCL's code."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from contrafed.core.layers import HalvingPool, group_norm
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, add_pooling, projector_of

# For each fire module: output channels, squeezed channels, whether its input is added, whether a pool follows.
MODULES = (
    (128, 16, False, False),
    (128, 16, True, False),
    (256, 32, False, True),
    (256, 32, True, False),
    (384, 48, False, False),
    (384, 48, True, False),
    (512, 64, False, True),
    (512, 64, False, False),
)


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


class Fire(nn.Module):
    """A 1x1 convolution to few channels, then parallel 1x1 and 3x3 ones, each with half the output."""

    def __init__(self, before: int, after: int, squeezed: int, shortcut: bool, groups: int) -> None:
        super().__init__()
        self.squeeze = _layer(before, squeezed, 1, groups)
        self.narrow, self.wide = _layer(squeezed, after // 2, 1, groups), _layer(squeezed, after // 2, 3, groups)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, after, H, W) for x (b, before, H, W)."""
        few = self.squeeze(x)
        out = torch.cat([self.narrow(few), self.wide(few)], 1)
        return out + x if self.shortcut else out


def _layer(before: int, after: int, kernel: int, groups: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, kernel, padding=kernel // 2), group_norm(after, groups), nn.ReLU())


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build a 3x3 stem of 96 channels and eight fire modules, each with its pool and followed by a level.

    The paper's classifier is a 1x1 convolution before the global average pool. Here it is the same linear layer after it.
    """
    stages: list[nn.Module] = [nn.Sequential(_layer(in_channels, 96, 3, config.groups), HalvingPool())]
    before = 96
    for after, squeezed, shortcut, pool in MODULES:
        fire = Fire(before, after, squeezed, shortcut, config.groups)
        stages.append(nn.Sequential(fire, HalvingPool()) if pool else fire)
        before = after
    projector, width = projector_of(before, config.projection)
    return SplitModel(add_pooling(stages, [nn.Identity() for _ in stages]), projector, nn.Linear(width, num_classes))
