"""folder: the user's images in folders, one per class."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np

from contrafed.core.disk import absent
from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.images import Common, ImageData, check_depth, make_images, stratified_split
from contrafed.data.loaded import Loaded, convert_image


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    path: str | None
    image_size: Annotated[int, Range(ge=8)]
    grayscale: bool
    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


# Names of folders that are splits of a data set. Others are refused as classes if they only look like splits.
SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "val",
    "valid": "val",
    "validation": "val",
}
LOOKS_LIKE_SPLIT = re.compile(
    r"(train|training|test|testing|val|valid|validation|eval|dev)([ _-]?(set|data|images?|imgs?|split))?", re.IGNORECASE
)


def load(config: Config, name: str, allow_empty: bool = False) -> ImageData:
    """Return the images of a folder with a folder for each class.

    The layout is ``path/train/CLASS/*`` and ``path/test/CLASS/*``, or ``path/CLASS/*`` with a stratified test split. Images in
    ``path/val/CLASS/*`` next to these are the validation split. Every image is resized to ``image_size`` squared. Hidden files
    and folders are left out. Other files are counted by their ending.

    Args:
        config: Settings of the data set.
        name: The data set's name.
        allow_empty: Whether a class may have no image.

    Raises:
        UserError: If the folder has no such layout.
    """
    root = Path(str(config.path)).expanduser()
    if root.is_file():
        raise UserError(f"dataset.path: {root} is a file. Fix: unpack it, or name its folder. dataset=npz takes an npz file")
    if not root.is_dir():
        raise absent("dataset.path", root, "no folder")
    splits = _find_splits(root)
    loaded = Loaded(notes=_note_other_folders(root, splits))
    if not splits:
        x, y, classes = _read(root, config, allow_empty, loaded)
        test = stratified_split(y, config.test_fraction, config.split_seed)
        return make_images(x, y, test, len(classes), loaded=replace(loaded, class_names=tuple(classes)))
    _count_loose(root, loaded)
    x, y, classes = _read(splits["train"], config, allow_empty, loaded)
    parts, split = [(x, y)], np.zeros(len(y), dtype=np.int64)
    for number, name in enumerate(name for name in ("test", "val") if name in splits):
        x, y, found = _read(splits[name], config, allow_empty, loaded)
        if not set(found) <= set(classes):
            more = min(set(found) - set(classes))
            where = f"class '{more}' is in {splits[name].name} but not in train"
            raise UserError(f"{root}: {where}. Fix: equal names in all splits")
        parts.append((x, np.array([classes.index(c) for c in found])[y]))
        split = np.concatenate([split, np.full(len(y), number + 1)])
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    loaded, validation = replace(loaded, class_names=tuple(classes)), split == 2 if "val" in splits else None
    return make_images(x, y, split == 1, len(classes), loaded=loaded, validation=validation)


def list_classes(root: Path) -> list[str]:
    """Return the names of the class folders below ``root`` in the order of their labels, without hidden ones."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and not _is_hidden(path))


def find_training(root: Path) -> Path:
    """Return the folder that holds the class folders of the training split."""
    return _find_splits(root).get("train", root)


def _find_splits(root: Path) -> dict[str, Path]:
    """Return the folders of the splits by ``train``, ``test`` and ``val``, or nothing if the folders are classes.

    Raises:
        UserError: If the folders look like splits, but are not train and test.
    """
    inside = list_classes(root)
    found = {SPLITS[name.lower()]: root / name for name in inside if name.lower() in SPLITS}
    if "train" in found and "test" in found and sum(name.lower() in SPLITS for name in inside) == len(found):
        return found
    if inside and all(LOOKS_LIKE_SPLIT.fullmatch(name) for name in inside):
        first = max(inside, key=lambda name: name.lower().startswith("train"))
        wanted = f"Fix: name the folders of the splits train and test, or set dataset.path={root / first}"
        raise UserError(f"{root} has {' and '.join(inside)}, which are splits and no classes. {wanted}")
    return {}


def _note_other_folders(root: Path, splits: dict[str, Path]) -> tuple[str, ...]:
    """Return a note about folders next to splits, which are left out, or about classes that are named like splits."""
    names = list_classes(root)
    if splits and (left := [name for name in names if root / name not in splits.values()]):
        return (f"{root}: {', '.join(left)} left out. Fix: move these images into the folders of the splits",)
    if not splits and (alike := [name for name in names if LOOKS_LIKE_SPLIT.fullmatch(name)]):
        fix = "Fix: move a split out of it, or have the classes in train and test"
        return (f"{root}: {', '.join(alike)} counts as a class, but is named like a split. {fix}",)
    return ()


def _count_loose(root: Path, loaded: Loaded) -> None:
    if loose := sum(path.is_file() and _is_image(path) for path in root.iterdir()):
        loaded.skipped["images outside of the classes"] += loose


def _is_hidden(path: Path) -> bool:
    return path.name.startswith(".") or path.name in ("__MACOSX", "Thumbs.db", "desktop.ini")


def _is_image(path: Path) -> bool:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return path.suffix.lower() in IMG_EXTENSIONS and not _is_hidden(path)


def _read(root: Path, config: Config, allow_empty: bool, loaded: Loaded) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return images (N,S,S[,3]), labels (N,) and class names of an ImageFolder layout, and count in ``loaded``."""
    from PIL import Image

    classes = list_classes(root)
    if not classes:
        raise UserError(
            f"{root} is no folder of class folders with images. Fix: put the images of each class in a folder of its name"
        )
    _count_loose(root, loaded)
    size, mode = config.image_size, "L" if config.grayscale else "RGB"
    images, labels = [], []
    for label, name in enumerate(classes):
        paths = _list_images(root / name, loaded)
        if not paths and not allow_empty:
            raise UserError(
                f"{root / name}: the class has no image; skipped file endings: {', '.join(loaded.skipped) or 'none'}. "
                "Fix: remove the folder if it is no class"
            )
        for path in paths:
            try:
                with Image.open(path) as image:
                    check_depth(image, str(path))
                    images.append(np.asarray(convert_image(image, mode, loaded.converted).resize((size, size))))
            except UserError:
                raise
            except Exception as error:  # decoders raise many types for a damaged image
                fault = f"an image cannot be read ({type(error).__name__}). Fix: replace or delete it"
                raise UserError(f"{path}: {fault}") from error
        labels += [label] * len(paths)
    if not images:
        raise UserError(f"{root} holds no image")
    return np.stack(images), np.array(labels, dtype=np.int64), classes


def _list_images(folder: Path, loaded: Loaded) -> list[Path]:
    """Return the image files of a class in a fixed order, also those of its subfolders, and count other files.

    Links are followed, but each folder is read once.
    """
    folders = [path.name for path in sorted(folder.iterdir()) if path.is_dir() and not _is_hidden(path)]
    if folders and not any(path.is_file() and _is_image(path) for path in folder.iterdir()):
        what = f"a class holds images, and this one holds only folders ({', '.join(folders[:3])})"
        raise UserError(f"{folder}: {what}. Fix: set dataset.path to the folder whose folders are the classes")
    images, walked, seen = [], [], set()
    for place, below, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not _is_hidden(Path(name)))
        walked.append((place, names))
    for place, names in sorted(walked):
        for path in (Path(place) / name for name in sorted(names)):
            if _is_image(path):
                images.append(path)
            elif not _is_hidden(path):
                loaded.skipped[path.suffix.lower() or "no ending"] += 1
    return images
