"""digits: the 1,797 real 8x8 images of handwritten digits in scikit-learn, without a network."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
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
    x, y = (array.copy() for array in _read())
    return make_images(x, y, stratified_split(y, config.test_fraction, config.split_seed))


@cache
def _read() -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels from scikit-learn's file. To import scikit-learn takes a second, so it is not imported."""
    found = find_spec("sklearn")
    file = Path(*((found and found.submodule_search_locations) or [])) / "datasets" / "data" / "digits.csv.gz"
    if file.exists():
        table = np.loadtxt(file, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True))
    return np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), table[:, -1].astype(np.int64)
