"""mobilenet_v2, shufflenet and squeezenet: torchvision's networks without BatchNorm, with strides for small images."""

from dataclasses import dataclass
from typing import Annotated, Literal

from torch import nn

from core.config import Range
from models.base import SplitModel, pooled, projector_of, without_batch_norm


@dataclass(frozen=True)
class Config:
    """Settings of the model."""

    backbone: Literal["mobilenet_v2", "shufflenet_v2_x1_0", "squeezenet1_1"]
    groups: Annotated[int, Range(ge=1)]
    projection: tuple[Annotated[int, Range(ge=1)], ...]


def build(config: Config, in_channels: int, image_size: tuple[int, int], num_classes: int) -> SplitModel:
    """Encoder: the backbone's stages with a global average pool; the levels are the stages' outputs.

    The backbones are made for 224x224 images: here the stem keeps the resolution, so that 8x8 images still have a pixel at
    the end. Levels are taken before a stage's last activation where it stands at the stage's end. SqueezeNet has no
    normalisation to replace, and its convolutional classifier becomes a linear one after the pool.
    """
    make = {"mobilenet_v2": _mobilenet, "shufflenet_v2_x1_0": _shufflenet, "squeezenet1_1": _squeezenet}
    stages, tails, width = make[config.backbone](in_channels)
    encoder = pooled(stages, tails)
    without_batch_norm(encoder, config.groups)
    projector, width = projector_of(width, config.projection)
    return SplitModel(encoder, projector, nn.Linear(width, num_classes))


def _mobilenet(in_channels: int) -> tuple[list[nn.Module], list[nn.Module], int]:
    from torchvision.models import mobilenet_v2

    blocks = list(mobilenet_v2().features)
    blocks[0][0] = nn.Conv2d(in_channels, 32, 3, 1, 1, bias=False)
    blocks[2].conv[1][0].stride = (1, 1)
    conv, norm, activation = blocks.pop()
    stages: list[nn.Module] = [nn.Sequential(*blocks[a:b]) for a, b in ((0, 2), (2, 4), (4, 7), (7, 14))]
    stages.append(nn.Sequential(*blocks[14:], conv, norm))
    return stages, [nn.Identity() for _ in stages[:-1]] + [activation], 1280


def _shufflenet(in_channels: int) -> tuple[list[nn.Module], list[nn.Module], int]:
    from torchvision.models import shufflenet_v2_x1_0

    net = shufflenet_v2_x1_0()
    net.conv1[0] = nn.Conv2d(in_channels, 24, 3, 1, 1, bias=False)
    stages: list[nn.Module] = [net.conv1[:2], net.stage2, net.stage3, net.stage4, net.conv5[:2]]
    return stages, [net.conv1[2], nn.Identity(), nn.Identity(), nn.Identity(), net.conv5[2]], 1024


def _squeezenet(in_channels: int) -> tuple[list[nn.Module], list[nn.Module], int]:
    from torchvision.models import squeezenet1_1

    layers = list(squeezenet1_1().features)
    layers[0] = nn.Conv2d(in_channels, 64, 3, 1, 1)
    pools = [nn.MaxPool2d(3, 2, 1) for _ in range(3)]
    stages: list[nn.Module] = [
        layers[0],
        nn.Sequential(*layers[3:5]),
        nn.Sequential(*layers[6:8]),
        nn.Sequential(*layers[9:13]),
    ]
    return stages, [nn.Sequential(nn.ReLU(), pools[0]), pools[1], pools[2], nn.Identity()], 512
