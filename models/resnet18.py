"""resnet18: FedRCL's ResNet-18, 3x3 stem without pool and GroupNorm."""

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from contrafed.core.layers import group_norm
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, add_pooling, projector_of

# Length of the longest CPU vector, in numbers of 4 bytes.
VECTOR_NUMBERS = 16


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    width: Annotated[int, Range(ge=1)]
    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


class Strided(nn.Conv2d):
    """A 1x1 convolution without bias that selects its pixels first.

    oneDNN's own backward pass writes past its memory for images with channels last, as here. It does so if there are fewer
    channels than fit a vector (its issue 6035, open for 3.13).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return every stride-th pixel of x (b, C, H, W) with mixed channels, (b, C', H', W')."""
        rows, columns = self.stride
        return F.conv2d(x[..., ::rows, ::columns], self.weight)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, without the ReLU after the sum."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = group_norm(after, groups)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = group_norm(after, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            layer = Strided if before < VECTOR_NUMBERS else nn.Conv2d
            self.shortcut = nn.Sequential(layer(before, after, 1, stride, bias=False), group_norm(after, groups))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the two paths (b, after, H', W')."""
        y: Tensor = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return y + self.shortcut(x)


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build conv1 and conv2_x .. conv5_x with width x (1, 1, 2, 4, 8) channels. Levels precede each stage's last ReLU."""
    w, groups = config.width, config.groups
    stages: list[nn.Module] = [nn.Sequential(nn.Conv2d(in_channels, w, 3, 1, 1, bias=False), group_norm(w, groups))]
    before = w
    for factor, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        after = factor * w
        stages.append(nn.Sequential(Block(before, after, stride, groups), nn.ReLU(), Block(after, after, 1, groups)))
        before = after
    projector, width = projector_of(before, config.projection)
    return SplitModel(add_pooling(stages, [nn.ReLU() for _ in stages]), projector, nn.Linear(width, num_classes))
