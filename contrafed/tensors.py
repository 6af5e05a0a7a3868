"""Tensors by name. Imports neither Flower nor Ray, which must be quiet before they are imported."""

from collections.abc import Mapping

from torch import Tensor

Tensors = dict[str, Tensor]


def group(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors ``NAME/x`` under the name x."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def ready(tensors: Mapping[str, Tensor], *, copy: bool = False) -> Tensors:
    """Return tensors as safetensors takes them: on the CPU, contiguous, no two in the same memory.

    ``copy``: also none in the memory of what was given, for a file that is written later.
    """
    out: Tensors = {}
    taken = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        out[name] = value.clone() if copy or place in taken else value
        taken.add(place)
    return out
