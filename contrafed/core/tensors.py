"""Handle tensors by name. Imports neither Flower nor Ray, whose output must be silenced before they are imported."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]

ALIGNMENT_BYTES = 64  # of the memory of a new tensor on a CPU

_inside: Any = torch._C._functorch
_is_wrapped: Callable[[Tensor], bool] = _inside.is_functorch_wrapped_tensor

# Names of the types in safetensors files.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def storable(tensor: Tensor) -> bool:
    """Return whether ``write`` can write a tensor: its type is one of ``TYPES`` and it is not sparse."""
    return tensor.dtype in TYPES and tensor.layout is torch.strided


def format_of(tensor: Tensor) -> str:
    """Return a tensor's type, preceded by an unusual layout: ``complex64``, ``sparse_coo float32``."""
    words = [tensor.dtype] if tensor.layout is torch.strided else [tensor.layout, tensor.dtype]
    return " ".join(str(word).removeprefix("torch.") for word in words)


def select_prefix(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors ``NAME/x`` under the name x."""
    prefix = f"{name}/"
    # By key: the tensors of a stack's client state are joined only on access.
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def add_prefix(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors x under the names ``NAME/x``: the inverse of ``select_prefix``."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def unwrap(value: Tensor) -> Tensor:
    """Return the tensor of all clients that a tensor within ``vmap`` and ``grad`` stands for."""
    while _is_wrapped(value):
        value = _inside.get_unwrapped(value)
    return value


def find_storage(value: Tensor) -> int:
    """Return where in memory the numbers of a tensor are. Views of one tensor have the same place."""
    return (unwrap(value) if _is_wrapped(value) else value).untyped_storage().data_ptr()


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a copy of the elements of tensors of one type, one tensor after another (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflat(elements: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors that ``flat`` joined, in the shapes of ``like``, as views of ``elements``."""
    parts = elements.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def settle(tensors: Tensors) -> None:
    """Wait until a GPU has computed these tensors. On the CPU there is nothing to wait for."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def on_host(tensors: Tensors) -> Tensors:
    """Return tensors on the CPU, as copies if they were on an accelerator.

    One copy is made per device and type, because each copy must be waited for. The returned tensors are views of it.
    """
    copies: Tensors = {}
    away = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
    for kind in {(tensor.device, tensor.dtype) for tensor in away.values()}:
        some = {name: tensor for name, tensor in away.items() if (tensor.device, tensor.dtype) == kind}
        try:
            copies |= unflat(flat(some).cpu(), some)
        except torch.OutOfMemoryError:  # no memory to join them
            copies |= {name: tensor.cpu() for name, tensor in some.items()}
    return {name: copies.get(name, tensor) for name, tensor in tensors.items()}


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row order, as a view if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, mode: int = 0o666) -> None:
    """Write a safetensors file.

    An existing file is overwritten in place. Never do that while its tensors are in use, because a loaded file is mapped, not
    read. ``read`` keeps the order of ``tensors``. The library's ``save_file`` takes four times as
    long here, and it refuses tensors that share memory.

    Args:
        path: The file.
        tensors: Tensors on any device. They may be views or share memory.
        metadata: Texts for the file's header.
        mode: Mode of a new file, without the umask. Client state is private (0600).

    Raises:
        OSError: If the file cannot be written.
    """
    # Wide types first, so that each value is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end, places = 0, dict[str, list[int]]()
    for name in order:
        start, end = end, end + tensors[name].numel() * tensors[name].element_size()
        places[name] = [start, end]
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, tensor in tensors.items():
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places[name]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "r+b" if path.exists() else "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(raw(tensors[name]))
        file.truncate()


def read(path: Path) -> Tensors:
    """Return the tensors of a safetensors file, mapped, in the order that ``write`` received.

    The library returns them in the order of their bytes. Code that joins them would then sum or draw in another order.

    Raises:
        OSError: If the file cannot be read.
        SafetensorError: If it is not a safetensors file. It may also be a ``ValueError``.
    """
    tensors = load_file(path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tensors[name] for name in header if name in tensors}


def align(tensor: Tensor) -> Tensor:
    """Return a tensor whose values begin where a new tensor's do, as a copy if they do not.

    Products of matrices on a CPU may round differently by where their operands begin. Tensors from a message or a file begin
    anywhere, so that devices and resumed runs would differ in the last bit.
    """
    return tensor.clone() if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT_BYTES else tensor


def move(held: dict[Any, Any] | list[Any], device: torch.device) -> None:
    """Move all tensors to a device, in place, also those in nested tables of a strategy's state."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(value, dict | list):
            move(value, device)
        elif isinstance(value, tuple):
            items = list(value)
            move(items, device)
            held[key] = tuple(items)
        elif isinstance(value, Tensor):
            held[key] = value.to(device)
