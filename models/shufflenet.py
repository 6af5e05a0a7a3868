"""shufflenet: ShuffleNet V1 with three groups and GroupNorm, as in FedRCL's code."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from contrafed.core.layers import group_norm
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, add_pooling, projector_of

CONVOLUTION_GROUPS = 3  # groups of the 1x1 convolutions
STEM, STAGES = 24, ((240, 4), (480, 8), (960, 4))  # channels of the stem, then channels and units of each stage


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


class Unit(nn.Module):
    """A grouped 1x1 convolution, a shuffle, a depthwise 3x3 one and a grouped 1x1 one, with a shortcut.

    At stride 1 the input is added to the output. At stride 2 a 3x3 average of the input precedes the output, which has the
    remaining channels.
    """

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        middle, made = after // 4, after if stride == 1 else after - before
        self.squeeze = nn.Sequential(
            nn.Conv2d(before, middle, 1, groups=CONVOLUTION_GROUPS), group_norm(middle, groups), nn.ReLU()
        )
        self.depthwise = nn.Sequential(nn.Conv2d(middle, middle, 3, stride, 1, groups=middle), group_norm(middle, groups))
        self.expand = nn.Sequential(nn.Conv2d(middle, made, 1, groups=CONVOLUTION_GROUPS), group_norm(made, groups))
        self.shrink = nn.Identity() if stride == 1 else nn.AvgPool2d(3, stride, 1)
        self.added = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, after, H', W') for x (b, before, H, W)."""
        middle = self.squeeze(x).unflatten(1, (CONVOLUTION_GROUPS, -1)).transpose(1, 2).flatten(1, 2)
        out, short = self.expand(self.depthwise(middle)), self.shrink(x)
        return torch.relu(short + out if self.added else torch.cat([short, out], 1))


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build a 3x3 stem that keeps the resolution and three stages that halve it, each followed by a level."""
    groups = config.groups
    stages: list[nn.Module] = [nn.Sequential(nn.Conv2d(in_channels, STEM, 3, 1, 1), group_norm(STEM, groups), nn.ReLU())]
    before = STEM
    for after, units in STAGES:
        first = Unit(before, after, 2, groups)
        stages.append(nn.Sequential(first, *(Unit(after, after, 1, groups) for _ in range(units - 1))))
        before = after
    projector, width = projector_of(before, config.projection)
    return SplitModel(add_pooling(stages, [nn.Identity() for _ in stages]), projector, nn.Linear(width, num_classes))
