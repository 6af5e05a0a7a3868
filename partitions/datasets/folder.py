"""folder: the user's images in folders, one per class."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.images import Common, ImageData, check_depth, make_images, stratified_split


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    path: str | None
    image_size: Annotated[int, Range(ge=8)]
    grayscale: bool
    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


# Names of folders that are splits of a data set, not classes.
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


def load(config: Config, name: str, allow_empty: bool = False) -> ImageData:
    """Return the images of a folder with a folder for each class.

    The layout is ``path/train/CLASS/*`` and ``path/test/CLASS/*``, or ``path/CLASS/*`` with a stratified test split. Every
    image is resized to ``image_size`` squared.

    Args:
        config: Settings of the data set.
        name: The data set's name.
        allow_empty: Whether a class may have no image.

    Raises:
        UserError: If the folder has no such layout.
    """
    root = Path(str(config.path)).expanduser()
    if not root.is_dir():
        raise UserError(f"dataset.path: there is no folder {root}")
    if (root / "train").is_dir() and (root / "test").is_dir():
        x, y, classes = _read(root / "train", config, allow_empty)
        x_test, y_test, test_classes = _read(root / "test", config, allow_empty)
        if not set(test_classes) <= set(classes):
            raise UserError(f"{root}: class '{min(set(test_classes) - set(classes))}' is in test but not in train")
        y_test = np.array([classes.index(c) for c in test_classes])[y_test]
        test = np.repeat([False, True], [len(y), len(y_test)])
        return make_images(np.concatenate([x, x_test]), np.concatenate([y, y_test]), test, len(classes))
    inside = sorted(path.name for path in root.iterdir() if path.is_dir())
    if inside and {name.lower() for name in inside} <= SPLITS:
        raise UserError(f"{root} has {' and '.join(inside)}; there must be train and test, or the classes themselves")
    x, y, classes = _read(root, config, allow_empty)
    return make_images(x, y, stratified_split(y, config.test_fraction, config.split_seed), len(classes))


def _read(root: Path, config: Config, allow_empty: bool) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images (N,S,S[,3]), labels (N,) and class names of an ImageFolder layout."""
    from PIL import Image
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(str(root), allow_empty=allow_empty)
    except OSError as error:
        raise UserError(f"{root} is no folder of class folders with images: {' '.join(str(error).split())}") from error
    size, mode = config.image_size, "L" if config.grayscale else "RGB"
    images = []
    for path, _ in found.samples:
        try:
            with Image.open(path) as image:
                check_depth(image, path)
                images.append(np.asarray(image.convert("RGB").convert(mode).resize((size, size))))
        except UserError:
            raise
        except Exception as error:  # decoders raise many types for a damaged image
            raise UserError(f"{path}: an image cannot be read ({type(error).__name__})") from error
    if not images:
        raise UserError(f"{root} holds no image")
    return np.stack(images), np.array(found.targets, dtype=np.int64), list(found.classes)
