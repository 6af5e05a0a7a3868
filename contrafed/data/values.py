"""Hold data that are no images: numbers such as a table's rows or a sensor's signals, and rows of tokens."""

import numpy as np
import torch

from contrafed.core.errors import UserError
from contrafed.core.inputs import Kind
from contrafed.data.images import ImageData, moments_of_values
from contrafed.data.labels import as_array, as_marks, check_classes, check_numbers
from contrafed.data.loaded import Loaded

MAX_UNUSED_TOKENS = 1_000_000  # above ten for each token of the data


def make_values(
    x: np.ndarray,
    y: np.ndarray,
    test: np.ndarray,
    num_classes: int | None = None,
    owner: np.ndarray | None = None,
    validation: np.ndarray | None = None,
    loaded: Loaded | None = None,
) -> ImageData:
    """Return checked data that are no images: values if ``x`` has floats, tokens if it has whole numbers.

    Lists and tensors are accepted as arrays.

    Args:
        x: Values (N, ...) that are finite, or tokens (N, n) from 0.
        y: Labels (N,), whole numbers.
        test: Marks the central test split (N,), bool or 0 and 1.
        num_classes: Number of classes. None means the largest label + 1.
        owner: The client that each example comes from (N,), or None.
        validation: Marks the central validation split (N,) likewise, or None without one.
        loaded: What the loader saw besides, such as the names of the classes.

    Raises:
        UserError: For numbers that no network takes, or other lengths.
    """
    x, y, owner = as_array(x, "x"), as_array(y, "labels"), None if owner is None else as_array(owner, "owners")
    check_numbers(y)
    lengths = {len(part) if part.ndim else 0 for part in (x, y, *([] if owner is None else [owner]))}
    if len(lengths) != 1:
        raise UserError(f"x, y and owner must have one length, got {', '.join(map(str, sorted(lengths)))}")
    test = as_marks(test, len(y), "test")
    validation = None if validation is None else as_marks(validation, len(y), "validation")
    held = test if validation is None else test | validation
    classes = check_classes(y, held, num_classes)
    if not x.size:
        raise UserError(f"x has no numbers, got {x.shape}. Fix: (N, n), a row for each example")
    kind: Kind = "tokens" if x.dtype.kind in "iu" else "values"
    if kind == "tokens" and (x.ndim != 2 or x.min() < 0):
        found = f"got {x.dtype} {x.shape} from {x.min()}"
        raise UserError(f"tokens must be whole numbers from 0 of shape (N, n), {found}. Fix: dataset.kind=values for numbers")
    if kind == "tokens" and (largest := int(x.max())) > (most := MAX_UNUSED_TOKENS + 10 * x.size):
        fix = "Fix: number the tokens from 0, or set dataset.kind=values for numbers"
        raise UserError(f"the largest token is {largest}, and each from 0 has an embedding, of at most {most}. {fix}")
    tensor = torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64 if kind == "tokens" else np.float32))
    tensor = tensor.unsqueeze(1) if x.ndim == 2 else tensor  # rows have one channel, as grey images have
    if kind == "values" and (bad := int((~tensor.isfinite()).sum())):
        raise UserError(f"{bad} numbers of x are NaN or infinite. Fix: fill or leave out what is missing")
    moments = ((0.0,), (1.0,)) if kind == "tokens" else moments_of_values(tensor[torch.from_numpy(~held)], x.ndim == 2)
    checked = None if validation is None else torch.from_numpy(validation)
    labels, split = torch.from_numpy(y.astype(np.int64)), torch.from_numpy(test)
    seen = loaded or Loaded()
    return ImageData(tensor, labels, split, *moments, classes, owner, loaded=seen, validation=checked, kind=kind)
