"""What a node keeps on its own disk: its personal model, and on a device what it remembers between two messages.

A device's ``state-dir`` holds, while a run lasts, ``memory/RUN-NODE.safetensors`` and, where the run has checkpoints,
``memory/RUN-NODE.kept``, what the node remembered at the last one; and ``personal/RUN/NODE.safetensors``. RUN is a number.
"""

import contextlib
import hashlib
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contrafed.core.disk import replace
from contrafed.core.tensors import PRIVATE, Tensors, group, raw, read, write

# Client state of another run is removed after so long without a change. Runs side by side keep theirs.
STALE_SECONDS = 30 * 24 * 3600.0


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
    write(whole, tensors, {"node": str(node)}, PRIVATE)
    replace(whole, target)


def read_personal(folder: str, node: int) -> tuple[Tensors, Tensors]:
    """Return what ``write_personal`` wrote: the model by tensor name, and the rest by message name."""
    tensors = read(personal_file(folder, node))
    return group(tensors, "model"), {name: value for name, value in tensors.items() if not name.startswith("model/")}


def shapes_in(folder: str, node: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a saved model's tensors by name, without reading them."""
    with safe_open(personal_file(folder, node), "pt") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  no mapping
        return {name.removeprefix("model/"): tuple(file.get_slice(name).get_shape()) for name in names}


class MemoryFileError(Exception):
    """What a node remembered cannot be used; the message says why."""


@dataclass(frozen=True)
class Moment:
    """Where a run stands when it asks a node, by which the node knows what of its files is the run's own past.

    A run that goes on from a checkpoint is another run to Flower: a sitting of ours. What a sitting did after the checkpoint
    from which the next went on never happened.
    """

    sitting: str  # Flower's run id
    server_round: int = 0
    past: Mapping[str, int] = field(default_factory=dict)  # sittings before -> the round of the checkpoint each was left at
    # The round of the last one that is on the server's disk, 0 for none yet; None: there are none.
    checkpoint: int | None = None
    known: int = 0  # the last round after which the server heard that this node remembers something

    def holds(self, sitting: str, server_round: int) -> bool:
        """Whether what a sitting wrote after a round is of this run as it stands."""
        return sitting == self.sitting or server_round <= self.past.get(sitting, -1)


@dataclass(frozen=True)
class StateDir:
    """The files of one node in one run below its ``state-dir``."""

    folder: Path
    run: str  # what the run is filed under: the Flower run id of its first sitting
    node: int  # partition id
    method: str

    @property
    def memory(self) -> Path:
        """Where the node's memory is."""
        return self.folder / "memory" / f"{self.run}-{self.node}.safetensors"

    @property
    def kept(self) -> Path:
        """Where what it remembered at the last checkpoint is, once it remembers something newer."""
        return self.memory.with_suffix(".kept")

    def personal(self, run: str) -> Path:
        """Return the folder of personal models of a run."""
        return self.folder / "personal" / run

    def open(self) -> None:
        """Make the folders; raises ``OSError``. Removes nothing: the run may yet be refused."""
        self.memory.parent.mkdir(parents=True, exist_ok=True)

    def remove_stale(self) -> None:
        """Remove client state of other runs that none has changed for ``STALE_SECONDS``; raises ``OSError``."""
        for path in self.memory.parent.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another run's process removed it
                if not path.name.startswith(f"{self.run}-") and time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def read(self, now: Moment) -> Tensors:
        """Return what the node remembers of the run as it stands ``now``, empty where there is nothing.

        Raises ``MemoryFileError`` for a file that is not whole, and where less is found than the server knows of.
        """
        for path in (self.memory, self.kept):
            if path.exists():
                tensors, (sitting, server_round) = self._read(path)
                if now.holds(sitting, server_round):
                    if server_round < now.known:
                        raise MemoryFileError(f"{path} is of round {server_round}, not of round {now.known}")
                    return tensors
        if now.known:
            raise MemoryFileError(f"{self.memory} of round {now.known} is not there")
        return {}

    def write(self, tensors: Tensors, now: Moment) -> None:
        """Replace the node's memory, on the disk before this returns: after a crash either the old or the new one is there.

        What a run would go back to from its last checkpoint is kept beside it. Raises ``OSError``; the old one then stays.
        """
        self.memory.parent.mkdir(parents=True, exist_ok=True)
        about = {**self._identity, "sitting": now.sitting, "round": str(now.server_round)}
        about["sha256"] = _digest(tensors, about)
        new = self.memory.with_suffix(".part")
        try:
            write(new, tensors, about, PRIVATE)
            if self._is_of_checkpoint(now):
                whole = self.memory.with_suffix(".part-kept")
                shutil.copy(self.memory, whole)  # with its mode
                replace(whole, self.kept)
            replace(new, self.memory)
        except OSError:
            new.unlink(missing_ok=True)
            self.memory.with_suffix(".part-kept").unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Forget the node's memory."""
        self.memory.unlink(missing_ok=True)
        self.kept.unlink(missing_ok=True)

    def _read(self, path: Path) -> tuple[Tensors, tuple[str, int]]:
        """Return the tensors in a file of memory, and by which sitting and after which round they were written."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
            tensors = read(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise MemoryFileError(f"{path} is damaged ({error})") from error
        for key, value in self._identity.items():
            if header.get(key) != value:
                raise MemoryFileError(f"{path} is of another {key}: {header.get(key)}, not {value}")
        if header.pop("sha256", None) != _digest(tensors, header):
            raise MemoryFileError(f"{path} is damaged (its checksum does not fit)")
        return tensors, (header["sitting"], int(header["round"]))

    def _is_of_checkpoint(self, now: Moment) -> bool:
        """Whether the memory that is about to be replaced is what the node remembered at the last checkpoint."""
        if now.checkpoint is None or not self.memory.exists():
            return False
        try:
            _, (sitting, server_round) = self._read(self.memory)
        except MemoryFileError:
            return False
        return now.holds(sitting, server_round) and server_round <= now.checkpoint

    @property
    def _identity(self) -> dict[str, str]:
        return {"run": self.run, "node": str(self.node), "method": self.method}


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return a checksum of names, types, shapes and values, and of what a header says: safetensors itself has none."""
    found = hashlib.sha256(repr(sorted(about.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(raw(value))
    return found.hexdigest()
