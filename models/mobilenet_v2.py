"""mobilenet_v2: inverted residuals with GroupNorm, as in FedRCL's code."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from contrafed.core.layers import group_norm
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel, add_pooling, projector_of

# For each stage: expansion, output channels, blocks, stride of the first block.
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 1), (6, 320, 1, 1))
STEM, LAST = 32, 1280


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


class Block(nn.Module):
    """A 1x1 convolution to many channels, a depthwise 3x3 one, and a 1x1 one to few channels without an activation.

    The output is added to an input of the same shape.
    """

    def __init__(self, before: int, after: int, expansion: int, stride: int, groups: int) -> None:
        super().__init__()
        many = expansion * before
        self.layers = nn.Sequential(
            *_layer(before, many, groups),
            nn.Conv2d(many, many, 3, stride, 1, groups=many),
            group_norm(many, groups),
            nn.ReLU6(),
            nn.Conv2d(many, after, 1),
            group_norm(after, groups),
        )
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, after, H', W') for x (b, before, H, W)."""
        out: Tensor = self.layers(x)
        return out + x if self.shortcut else out


def _layer(before: int, after: int, groups: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 1, padding=padding), group_norm(after, groups), nn.ReLU6()]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Build a 1x1 stem with a border of one pixel, seven stages and a 1x1 convolution.

    Levels follow the stem and stages 1-6. The last stage and the convolution to 1,280 channels are one stage of the encoder.
    """
    groups = config.groups
    stages: list[nn.Module] = [nn.Sequential(*_layer(in_channels, STEM, groups, padding=1))]
    before = STEM
    for expansion, after, blocks, stride in STAGES:
        first = Block(before, after, expansion, stride, groups)
        stages.append(nn.Sequential(first, *(Block(after, after, expansion, 1, groups) for _ in range(blocks - 1))))
        before = after
    stages.append(nn.Sequential(stages.pop(), *_layer(before, LAST, groups)))
    projector, width = projector_of(LAST, config.projection)
    return SplitModel(add_pooling(stages, [nn.Identity() for _ in stages]), projector, nn.Linear(width, num_classes))
