"""npz: the user's examples from one NumPy file: images, other numbers, or tokens."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from contrafed.core.disk import absent
from contrafed.core.errors import UserError, nearest, unknown
from contrafed.core.schema import Range
from contrafed.data.images import Common, ImageData, make_images, stratified_split
from contrafed.data.labels import check_labels, check_owners, number_labels
from contrafed.data.loaded import Loaded
from contrafed.data.values import make_values

ARRAYS = ("x", "y", "split", "owner")
NEAR_ARRAYS = 0.5  # the likeness of a name that is refused, such as xs
TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".pq", ".arff")

HALF_LEVEL = 0.4 / 255  # by which float pixels may be outside of [0, 1], since they round into it
MAX_ROUNDING = 0.01  # of a column's values in 32 bits, in its standard deviations
SPECTRA = "x.transpose(0, 3, 1, 2) with dataset.kind=values, which mlp takes"
OTHERWISE = "Fix: scale them, or set dataset.kind=values if these are no images"


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    path: str | None
    num_classes: Annotated[int, Range(ge=2)] | None
    kind: Literal["image", "values", "tokens"] | None
    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


def load(config: Config, name: str) -> ImageData:
    """Return the examples of an npz file.

    It has arrays ``x`` and ``y`` (N,). Images are (N,H,W) or (N,H,W,C), uint8 or float in [0,1]. Arrays with other axes, and
    those that ``kind`` names, are values (N, ...) of floats or tokens (N, n) of whole numbers. An optional ``split`` (N,) has 0
    for train, 1 for test and 2 for validation. Without it the test split is stratified and random. An optional ``owner`` (N,)
    says whom an example is from, for partition=natural. Labels that are text are numbered in alphabetical order. Other arrays
    are left out, unless their names are nearly those of the four.

    Raises:
        UserError: If the file or an array is not valid.
    """
    path = Path(str(config.path)).expanduser()
    if path.is_dir():
        raise UserError(f"{path}: a folder. Fix: dataset=folder, or an npz file")
    if path.suffix.lower() in TABLES and path.is_file():
        fix = "Fix: read it with pandas, and save numbers and labels by numpy.savez(FILE, x=, y=)"
        raise UserError(f"{path} is no readable npz file but a table. {fix}")
    if path.is_file() and not zipfile.is_zipfile(path):
        raise UserError(f"{path}: not an npz file, or cut. Fix: write one with numpy.savez(FILE, x=, y=)")
    x, y, split, owner, spare = _read_arrays(path)
    y, names = number_labels(y, str(path))
    if config.num_classes is None:
        check_labels(y, str(path), "number them from 0, or set dataset.num_classes")
    for array, values in (("split", split), ("owner", owner)):
        if values is not None and values.ndim != 1:
            raise UserError(f"{path}: {array} must have one entry for each example, (N,), got {values.shape}")
    validation = None
    if split is None:
        test = stratified_split(y, config.test_fraction, config.split_seed)
    elif split.dtype.kind not in "biuf" or not np.isin(split, (0, 1, 2)).all():
        found = np.unique(split)[:5].tolist()
        raise UserError(f"{path}: split must be 0 (train), 1 (test) or 2 (validation), found {found}")
    else:
        test, validation = split == 1, split == 2 if (split == 2).any() else None
    if owner is not None:
        check_owners(owner, str(path))
    kind = config.kind or ("image" if x.ndim in (3, 4) else "tokens" if x.dtype.kind in "iu" else "values")
    left = f"{path}: {', '.join(spare)} left out. Fix: rename an array to split or owner if it is one"
    loaded = Loaded(names, notes=(left,) if spare else ())
    try:
        if kind != "image":
            return make_values(_check_dtype(x, kind), y, test, config.num_classes, owner, validation, loaded)
        if x.ndim == 4 and x.shape[3] not in (1, 3) and x.shape[1] not in (1, 3):
            fix = f"Fix: {'x[..., :3] without transparency, or ' if x.shape[3] == 4 else ''}{SPECTRA}"
            raise UserError(f"images have 1 or 3 channels, got {x.shape[1]}x{x.shape[2]} with {x.shape[3]}. {fix}")
        return make_images(_as_bytes(x, path), y, test, config.num_classes, owner, loaded, validation)
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None


def _read_arrays(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None, list[str]]:
    """Return x, y, split and owner of a file, the latter two None where it has none, and the names of its other arrays."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in ("x", "y") if key not in file]
            if missing:
                held = ", ".join(file.files) or "nothing"
                raise UserError(f"{path} has no array '{missing[0]}'; it holds: {held}. Fix: save x= and y=")
            spare = [key for key in file.files if key not in ARRAYS]
            if other := [key for key in spare if nearest(key, ARRAYS, NEAR_ARRAYS)]:
                raise UserError(f"{path}: {unknown('array', other[0], ARRAYS)}")
            x, y, split, owner = (_read_array(file, name, path) for name in ("x", "y", "split", "owner"))
    except FileNotFoundError:
        raise absent("dataset.path", path) from None
    except UserError:
        raise
    except Exception as error:  # zip, zlib and NumPy raise many types for a damaged file
        raise UserError(f"{path} is no readable npz file: {' '.join(str(error).split())}") from error
    if other := [name for name, found in (("x", x), ("y", y), ("split", split), ("owner", owner)) if isinstance(found, bytes)]:
        raise UserError(f"{path}: '{other[0]}' is no array; numpy.savez(FILE, x=, y=) writes them")
    assert x is not None  # neither is missing
    assert y is not None
    return x, y, split, owner, spare


def _read_array(file: Any, name: str, path: Path) -> np.ndarray | None:
    """Return an array of an open file, None if it has none of this name. Raises ``UserError`` for Python objects."""
    try:
        array: np.ndarray | None = file.get(name)
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        fix = f"Fix: {name}.astype(str) for text, {name}.astype(float) for numbers, before numpy.savez"
        raise UserError(f"{path}: {name} has Python objects. {fix}") from error
    return array


def _check_dtype(x: np.ndarray, kind: str) -> np.ndarray:
    """Return values as floats, or tokens as they are. Raises ``UserError`` for another type or shape."""
    if x.ndim < 2 or x.dtype.kind not in ("iu" if kind == "tokens" else "biuf"):
        wanted = "whole numbers (N, n)" if kind == "tokens" else "numbers (N, ...)"
        raise UserError(f"x must be {wanted} for dataset.kind={kind}, got {x.dtype} {x.shape}")
    if kind == "tokens" or not x.size:
        return x
    with np.errstate(over="ignore", invalid="ignore"):  # infinite numbers are reported later
        found = x.astype(np.float32)
        lost, spread = np.abs(found - x).max(0).ravel(), x.std(0, dtype=np.float64).ravel()
        varies = x.max(0).ravel() > x.min(0).ravel()  # a constant column may have a deviation of rounding
        coarse = np.isfinite(lost) & (lost > MAX_ROUNDING * spread) & varies
    if coarse.any():
        column = int(coarse.argmax())
        where = f"column {column}, of values as {found.reshape(len(x), -1)[0, column]:.3g}"
        raise UserError(f"x: 32 bits cannot hold the differences within {where}. Fix: subtract the column's smallest value")
    return found


def _as_bytes(x: np.ndarray, path: Path) -> np.ndarray:
    """Return uint8 images, with floats in [0,1] rounded to the nearest of 256 levels."""
    if x.dtype == np.uint8:
        return x
    if not np.issubdtype(x.dtype, np.floating):
        raise UserError(f"{path}: x must be uint8, or float in [0, 1], got {x.dtype}. {OTHERWISE}")
    bad = int(np.count_nonzero(~np.isfinite(x)))
    if bad:
        raise UserError(f"{path}: {bad} pixels of x are NaN or infinite. Fix: leave these images out")
    if x.size and (x.min() < -HALF_LEVEL or x.max() > 1 + HALF_LEVEL):
        raise UserError(f"{path}: float pixels must be in [0, 1], found {x.min():g}..{x.max():g}. {OTHERWISE}")
    return np.rint(x * 255).astype(np.uint8)
