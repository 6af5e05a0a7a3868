"""own: every client has its own images and the server has none. The settings describe the images."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.images import MIN_SIDE_PX, Common, ImageData


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    channels: Annotated[int, Range(ge=1, le=3)]
    height: Annotated[int, Range(ge=MIN_SIDE_PX)]
    width: Annotated[int, Range(ge=MIN_SIDE_PX)]
    num_classes: Annotated[int, Range(ge=2)] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


def check(config: Config, name: str) -> None:
    """Raise ``UserError`` for settings that contradict each other."""
    if config.num_classes is None:
        raise UserError("dataset=own needs dataset.num_classes: no client alone knows how many classes there are")
    if config.channels == 2:
        raise UserError("dataset.channels must be 1 or 3, got 2")
    if config.normalize == "image_deviations":
        raise UserError("dataset.normalize=image_deviations needs images, which dataset=own has none of; set dataset.std")
    for key, values in (("mean", config.mean), ("std", config.std)):
        if len(values) not in (1, config.channels):
            raise UserError(f"dataset.{key} needs one number, or one for each of {config.channels} channels, got {len(values)}")
    if min(config.std) <= 0:
        raise UserError(f"dataset.std must be > 0, got {min(config.std)}")


def load(config: Config, name: str) -> ImageData:
    """Return no images, but the shape of the clients' images.

    Raises:
        UserError: If settings contradict each other.
    """
    check(config, name)
    assert config.num_classes is not None
    x = torch.zeros((0, config.height, config.width, config.channels), dtype=torch.uint8).permute(0, 3, 1, 2)
    mean, std = (values * (config.channels // len(values)) for values in (config.mean, config.std))
    nothing = torch.zeros(0, dtype=torch.int64)
    return ImageData(x, nothing, nothing.bool(), mean, std, config.num_classes, np.zeros(0, dtype=np.int64))
