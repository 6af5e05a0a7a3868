"""What a node keeps on its own disk: its personal model, and on a device what it remembers between two messages.

A device's ``state-dir`` holds ``memory/RUN-NODE.safetensors`` while a run lasts and ``personal/RUN/NODE.safetensors``.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from core.tensors import Tensors, group, raw, write


def personal_file(folder: str | Path, node: int) -> Path:
    """Return where the model of a node (partition id) is."""
    return Path(folder) / f"{node}.safetensors"


def write_personal(folder: str, node: int, model: Tensors, received: Tensors) -> None:
    """Write a node's ``model`` and what it ``received`` beside a model, such as prototypes; replaces a file whole."""
    target = personal_file(folder, node)
    target.parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in received.items() if not name.startswith("model/")}
    tensors = {f"model/{name}": value for name, value in model.items()} | rest
    whole = target.with_suffix(".part")
    write(whole, tensors, {"node": str(node)})
    os.replace(whole, target)


def read_personal(folder: str, node: int) -> tuple[Tensors, Tensors]:
    """Return what ``write_personal`` wrote: the model by tensor name, and the rest by message name."""
    tensors = load_file(personal_file(folder, node))
    return group(tensors, "model"), {name: value for name, value in tensors.items() if not name.startswith("model/")}


def shapes_in(folder: str, node: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a saved model's tensors by name, without reading them."""
    with safe_open(personal_file(folder, node), "pt") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  no mapping
        return {name.removeprefix("model/"): tuple(file.get_slice(name).get_shape()) for name in names}


class MemoryFileError(Exception):
    """What a node remembered cannot be used; the message says why."""


@dataclass(frozen=True)
class StateDir:
    """The files of one node in one run below its ``state-dir``."""

    folder: Path
    run: str  # Flower's run id
    node: int  # partition id
    method: str

    @property
    def memory(self) -> Path:
        """Where the node's memory is."""
        return self.folder / "memory" / f"{self.run}-{self.node}.safetensors"

    def personal(self, run: str) -> Path:
        """Return the folder of personal models of a run."""
        return self.folder / "personal" / run

    def open(self) -> None:
        """Make the folders and remove what earlier runs left of memory; raises ``OSError``."""
        self.memory.parent.mkdir(parents=True, exist_ok=True)
        for path in self.memory.parent.iterdir():
            if not path.name.startswith(f"{self.run}-"):
                path.unlink(missing_ok=True)

    def read(self) -> Tensors:
        """Return the node's memory, empty where there is none; raises ``MemoryFileError`` for a file that is not whole."""
        if not self.memory.exists():
            return {}
        try:
            with safe_open(self.memory, "pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping
        except (SafetensorError, OSError) as error:
            raise MemoryFileError(f"{self.memory} is damaged ({error})") from error
        for key, value in self._identity.items():
            if header.get(key) != value:
                raise MemoryFileError(f"{self.memory} is of another {key}: {header.get(key)}, not {value}")
        if header.get("sha256") != _digest(tensors):
            raise MemoryFileError(f"{self.memory} is damaged (its checksum does not fit)")
        return tensors

    def write(self, tensors: Tensors) -> None:
        """Replace the node's memory, on the disk before this returns: after a crash either the old or the new one is there."""
        self.memory.parent.mkdir(parents=True, exist_ok=True)
        whole = self.memory.with_suffix(".part")
        write(whole, tensors, {**self._identity, "sha256": _digest(tensors)})
        _sync(whole)
        os.replace(whole, self.memory)
        _sync(self.memory.parent)

    def remove(self) -> None:
        """Forget the node's memory."""
        self.memory.unlink(missing_ok=True)

    @property
    def _identity(self) -> dict[str, str]:
        return {"run": self.run, "node": str(self.node), "method": self.method}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, types, shapes and values: safetensors itself has none."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(raw(value))
    return found.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
