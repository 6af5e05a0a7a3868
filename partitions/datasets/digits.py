"""digits: the 1,797 real 8x8 images of handwritten digits in scikit-learn, without a network."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.schema import Range
from contrafed.data.images import Common, ImageData, make_images, stratified_split


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


def load(config: Config, name: str) -> ImageData:
    """Return the images with a stratified test split, and grey levels 0..16 scaled to 0..255."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = np.rint(raw.images * (255 / 16)).astype(np.uint8)
    y = raw.target.astype(np.int64)
    return make_images(x, y, stratified_split(y, config.test_fraction, config.split_seed))
