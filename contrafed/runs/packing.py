"""Write a strategy's state as JSON and tensors, and read it back with all its types."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core.tensors import Tensors


def pack(value: Any, place: str, tensors: Tensors) -> Any:
    """Return ``value`` as JSON, with its arrays in ``tensors[place]``.

    It may contain tensors, arrays, numbers and text, in dictionaries, lists and tuples. All types are restored. Keys of
    dictionaries are text or whole numbers, such as partition ids.

    Raises:
        TypeError: For any other value.
    """
    if isinstance(value, str):  # also NumPy's text
        return {"value": str(value)}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        while place in tensors:  # {"a": {"b": x}, "a/b": y}
            place += "'"
        # A copy, because torch takes no array with negative strides or without write access.
        tensors[place] = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value, order="C"))
        return {"tensor" if isinstance(value, Tensor) else "array" if isinstance(value, np.ndarray) else "number": place}
    if isinstance(value, Mapping):
        return {"dict": [[_key(key, place), pack(item, f"{place}/{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        items = [pack(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    if value is None or isinstance(value, bool | int | float):
        return {"value": value}
    raise TypeError(f"a strategy's state cannot hold {type(value).__name__} ({place})")


def unpack(packed: Any, tensors: Tensors) -> Any:
    """Return the value that ``pack`` received."""
    ((kind, content),) = packed.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy().copy()
    if kind == "number":
        return tensors[content].numpy()[()]
    if kind == "dict":
        return {key: unpack(item, tensors) for key, item in content}
    if kind in ("list", "tuple"):
        return (list if kind == "list" else tuple)(unpack(item, tensors) for item in content)
    return content


def put_back(held: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    """Restore a state from a checkpoint in place. Tables that other objects refer to are filled, not replaced."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(held.get(key), dict):
            for gone in held[key].keys() - value.keys():
                del held[key][gone]
            put_back(held[key], value)
        else:
            held[key] = value


def _key(key: Any, place: str) -> str | int:
    """Return a dictionary's key as JSON restores it."""
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    raise TypeError(f"a strategy's state has dictionaries whose keys are text or whole numbers, not {key!r} ({place})")
