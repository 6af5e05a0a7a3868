"""Check what a data set says of each example: its label, its owner, and the splits to which it belongs."""

from typing import Any

import numpy as np

from contrafed.core.errors import UserError

MIN_DISTINCT_LABELS = 20  # of as many examples, which may be numbers of examples instead of classes
# Texts that stand for a missing value, in lower case: blank, and what pandas and Python write for one.
MISSING_TEXTS = ("", "nan", "none", "<na>", "nat")
MISSING = 'NaN, None, infinite, blank, or a text such as "nan" or "nat"'


def as_array(values: Any, name: str) -> np.ndarray:
    """Return a list, tensor or array as an array. Raises ``UserError``, which calls it ``name``, for what is none."""
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # lists of unequal length, tensors on a GPU
        raise UserError(f"{name} must be an array: {' '.join(str(error).split()).rstrip('.')}. Fix: a NumPy array") from error


def as_marks(values: Any, count: int, name: str) -> np.ndarray:
    """Return marks of examples (N,) as bool. Lists and tensors are accepted as arrays, and 0 and 1 as marks.

    Args:
        values: The marks.
        count: N.
        name: The split that they mark, for messages: test or validation.

    Raises:
        UserError: For another shape, or other values.
    """
    marks = as_array(values, f"the {name} split")
    if marks.shape != (count,):
        got = f"got {marks.shape}. Fix: give marks of shape ({count},)"
        raise UserError(f"the {name} split must have one mark for each of {count} examples, {got}")
    if marks.dtype.kind not in "biuf" or not np.isin(marks, (0, 1)).all():
        got = f"got {np.unique(marks)[:5].tolist() if marks.dtype.kind in 'iuf' else marks.dtype}"
        raise UserError(f"the {name} split must have True or False, or 1 or 0, {got}. Fix: mark what is in it, as split == 1")
    return marks.astype(bool)


def find_missing(values: np.ndarray) -> np.ndarray:
    """Return which labels or owners (N,) are missing, bool: NaN, NaT, infinite, None, blank, or a text such as "nan"."""
    if values.dtype.kind in "fc":
        return ~np.isfinite(values)
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind in "US":
        return np.isin(np.char.lower(np.char.strip(_decode(values))), MISSING_TEXTS)
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    return np.array([str(each).strip().casefold() in MISSING_TEXTS for each in values], dtype=bool)


def _decode(values: np.ndarray) -> np.ndarray:
    """Return an array of text or bytes as text."""
    return np.char.decode(values, "utf-8", "replace") if values.dtype.kind == "S" else values


def number_labels(y: np.ndarray, where: str, fix: str | None = None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels as whole numbers (N,), and the names of the classes if the labels were text, in alphabetical order.

    Args:
        y: The labels.
        where: Their source, for messages.
        fix: What to do about missing labels, and about those of another type or shape. None: a change of the array.

    Raises:
        UserError: For missing labels, and for those that are neither whole numbers nor text.
    """
    if y.ndim == 1 and (missing := int(find_missing(y).sum())):
        rename = ", or rename a class that is called so" if y.dtype.kind in "US" else ""
        raise UserError(f"{where}: {missing} labels are missing ({MISSING}). Fix: {fix or 'leave these examples out'}{rename}")
    if y.ndim == 1 and y.dtype.kind in "US":
        names, numbers = np.unique(_decode(y), return_inverse=True)
        return numbers, tuple(names.tolist())
    if y.ndim != 1 or y.dtype.kind not in "iu":
        change = "y.astype(int), if they are classes" if y.ndim != 2 else "y[:, 0]" if y.shape[1] == 1 else "y.argmax(1)"
        raise UserError(f"{where}: labels must be whole numbers (N,) or text, got {y.dtype} {y.shape}. Fix: {fix or change}")
    return y, ()


def check_numbers(y: np.ndarray) -> None:
    """Raise ``UserError`` unless labels ``y`` are whole numbers (N,)."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError(f"labels y must be whole numbers (N,), got {y.dtype} {y.shape}")


def check_classes(y: np.ndarray, test: np.ndarray, num_classes: int | None) -> int:
    """Return the number of classes. Raises ``UserError`` for labels out of range, or without training images."""
    if not len(y) or test.all():
        raise UserError(f"the training split is empty; there are {len(y)} images, {len(y)} of them for testing")
    low, high = int(y.min()), int(y.max())
    classes = num_classes if num_classes is not None else high + 1
    if low < 0 or high >= classes:
        raise UserError(f"labels must be in 0..{classes - 1}, found {low}..{high}")
    if classes < 2:
        raise UserError(f"there must be at least 2 classes, found {classes}")
    return classes


def check_labels(y: np.ndarray, where: str, remedy: str) -> None:
    """Raise ``UserError`` unless each label ``y`` (N,) of 0 .. max(y) occurs, because a gap makes classes without examples."""
    if not len(y):
        return
    found, low, high = len(np.unique(y)), int(y.min()), int(y.max())
    if found == len(y) > MIN_DISTINCT_LABELS:
        raise UserError(
            f"{where}: each of {len(y)} examples has a label of its own. Fix: give y classes, not numbers of examples"
        )
    if high > 10 * found + 1000:
        raise UserError(f"{where}: the largest label is {high} though only {found} occur; labels count from 0: {remedy}")
    if low < 0:
        raise UserError(f"{where}: labels count from 0, found {low}..{high}. Fix: number them from 0, without unlabelled ones")
    if low > 0:
        raise UserError(f"{where}: labels count from 0, found {low}..{high}: {remedy}")
    if found <= high:
        raise UserError(f"{where}: labels are 0..{high}, of which {found} occur: {remedy}")


def check_owners(owner: np.ndarray, where: str) -> None:
    """Raise ``UserError`` unless each example has an owner (N,). What counts as missing is in ``find_missing``."""
    if missing := int(find_missing(owner).sum()):
        rename = ", or rename an owner who is called so" if owner.dtype.kind in "USO" else ""
        fix = f"Fix: name a client for each, or leave them out{rename}"
        raise UserError(f"{where}: owner is missing for {missing} examples ({MISSING}). {fix}")
