"""Tensors by name. Imports neither Flower nor Ray, which must be quiet before they are imported."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Tensors = dict[str, Tensor]

# What safetensors calls them.
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
    """Whether ``write`` can write a tensor: of one of ``TYPES``, and not sparse."""
    return tensor.dtype in TYPES and tensor.layout is torch.strided


def format_of(tensor: Tensor) -> str:
    """Return a tensor's type, and its layout where that is not the usual one: ``complex64``, ``sparse_coo float32``."""
    words = [tensor.dtype] if tensor.layout is torch.strided else [tensor.layout, tensor.dtype]
    return " ".join(str(word).removeprefix("torch.") for word in words)


def group(tensors: Mapping[str, Tensor], name: str) -> Tensors:
    """Return the tensors ``NAME/x`` under the name x."""
    prefix = f"{name}/"
    # By key: a stack's memory is brought together only where it is asked for.
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}


def named(name: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors x under the names ``NAME/x``: the inverse of ``group``."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the elements of tensors of one type, one tensor after another (n,), as a copy."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflat(elements: Tensor, like: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors that ``flat`` put one after another, in the shapes of ``like``: views of ``elements``."""
    parts = elements.split([tensor.numel() for tensor in like.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(like.items(), parts, strict=True)}


def settle(tensors: Tensors) -> None:
    """Wait until a GPU has computed what was asked of it for these tensors; nothing where they are on the CPU."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def on_host(tensors: Tensors) -> Tensors:
    """Return tensors on the CPU: those that are there themselves, of others copies.

    From an accelerator comes one copy a type, since each is waited for; the tensors are views of it.
    """
    copies: Tensors = {}
    away = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
    for kind in {(tensor.device, tensor.dtype) for tensor in away.values()}:
        some = {name: tensor for name, tensor in away.items() if (tensor.device, tensor.dtype) == kind}
        try:
            copies |= unflat(flat(some).cpu(), some)
        except torch.OutOfMemoryError:  # it has no room to put them one after another
            copies |= {name: tensor.cpu() for name, tensor in some.items()}
    return {name: copies.get(name, tensor) for name, tensor in tensors.items()}


def raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row order: a view of it where it is on the CPU and contiguous."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


# Mode of files that their owner alone reads.
PRIVATE = 0o600


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, mode: int = 0o666) -> None:
    """Write a safetensors file; tensors may be on any device, be views, or share memory. Raises ``OSError``.

    ``mode`` is that of a new file, less the umask: client state is private (0600).

    What ``path`` held before is written over in place: never do that to a file whose tensors are in use, since a loaded file
    is mapped, not read.

    ``read`` finds them in the order of ``tensors``. The library's own ``save_file`` writes through a mapping of the file,
    which costs four times the time here, and refuses tensors that share memory.
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
    """Return the tensors of a safetensors file, mapped, in the order in which ``write`` was given them.

    The library gives them in the order of their bytes, by which code that joins them would sum or draw otherwise. Raises
    ``OSError``, and ``SafetensorError`` or ``ValueError`` for a file that is none.
    """
    tensors = load_file(path)
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tensors[name] for name in header if name in tensors}


def move(held: dict[Any, Any] | list[Any], device: torch.device) -> None:
    """Move all tensors to a device, in place: a rule may hold a table of its state itself."""
    for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
        if isinstance(value, dict | list):
            move(value, device)
        elif isinstance(value, tuple):
            items = list(value)
            move(items, device)
            held[key] = tuple(items)
        elif isinstance(value, Tensor):
            held[key] = value.to(device)
