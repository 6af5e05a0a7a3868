"""Keep a client's files on its own disk: its personal model, and on a device the client state between two messages.

During a run a device's ``state-dir`` holds ``client_state/RUN-CLIENT.safetensors`` and ``personal/RUN/CLIENT.safetensors``. If
the run has checkpoints it also holds ``client_state/RUN-CLIENT.kept``, the client state at the last one. The fingerprint of the
client's own data is in ``client_state/RUN-CLIENT.data`` then. RUN is a number.
"""

import contextlib
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from contrafed.core.disk import PRIVATE, copy_private, replace
from contrafed.core.errors import UserError
from contrafed.core.tensors import Tensors, raw, read, select_prefix, write

# Client state of another run is removed after so long without a change. Runs side by side keep theirs.
STALE_SECONDS = 30 * 24 * 3600.0


def personal_file(folder: str | Path, client: int) -> Path:
    """Return the file of a client's model. ``client`` is its partition id."""
    return Path(folder) / f"{client}.safetensors"


def best_folder(folder: str) -> str:
    """Return the folder of the models at the best evaluation, next to that of a run's personal models."""
    return f"{folder}-best"


def write_personal(folder: str, client: int, model: Tensors, received: Tensors) -> None:
    """Write a client's ``model``, and other tensors by which it is evaluated: what it ``received``, such as prototypes.

    The file is replaced as a whole.
    """
    target = personal_file(folder, client)
    target.parent.mkdir(parents=True, exist_ok=True)
    rest = {name: value for name, value in received.items() if not name.startswith("model/")}
    tensors = {f"model/{name}": value for name, value in model.items()} | rest
    whole = target.with_suffix(".part")
    write(whole, tensors, {"client": str(client)}, PRIVATE)
    replace(whole, target)


def read_personal(folder: str, client: int) -> tuple[Tensors, Tensors]:
    """Return the model by tensor name, and the other tensors by message name, as ``write_personal`` wrote them."""
    tensors = read(personal_file(folder, client))
    return select_prefix(tensors, "model"), {name: value for name, value in tensors.items() if not name.startswith("model/")}


def shapes_in(folder: str, client: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a saved model's tensors by name. Their values are not loaded."""
    with safe_open(personal_file(folder, client), "pt") as file:
        names = [name for name in file.keys() if name.startswith("model/")]  # noqa: SIM118  no mapping
        return {name.removeprefix("model/"): tuple(file.get_slice(name).get_shape()) for name in names}


class ClientStateError(Exception):
    """The stored client state cannot be used. The message says why."""


@dataclass(frozen=True)
class Moment:
    """Where a run stands when it sends a message, by which the client knows which of its files belong to the run's past.

    For Flower a resumed run is another run, here an attempt. Everything that an attempt did after the checkpoint from which the
    next one resumed is discarded.
    """

    sitting: str  # Flower's run id
    server_round: int = 0
    # earlier attempts -> the round of the checkpoint that the next one resumed from
    past: Mapping[str, int] = field(default_factory=dict)
    # The round of the last checkpoint on the server's disk, 0 for none yet, None for a run without checkpoints.
    checkpoint: int | None = None
    known: int = 0  # the last round after which this client reported client state to the server

    def holds(self, sitting: str, server_round: int) -> bool:
        """Return whether what an attempt wrote after a round belongs to this run."""
        return sitting == self.sitting or server_round <= self.past.get(sitting, -1)


@dataclass(frozen=True)
class StateDir:
    """The files of one client in one run, below its ``state-dir``."""

    folder: Path
    run: str  # name of the run in the files: the Flower run id of its first attempt
    client: int  # partition id
    method: str

    @property
    def state_file(self) -> Path:
        """The file of the client state."""
        return self.folder / "client_state" / f"{self.run}-{self.client}.safetensors"

    @property
    def checkpoint_state_file(self) -> Path:
        """The file of the client state at the last checkpoint, once there is a newer state."""
        return self.state_file.with_suffix(".kept")

    @property
    def fingerprint_file(self) -> Path:
        """The file of the fingerprint of the client's own data."""
        return self.state_file.with_suffix(".data")

    def personal(self, run: str) -> Path:
        """Return the folder of a run's personal models."""
        return self.folder / "personal" / run

    def open(self) -> None:
        """Make the folders, and remove nothing, because the run may still be refused. Raises ``OSError``."""
        self.state_file.parent.mkdir(parents=True, exist_ok=True)

    def check_data(self, fingerprint: str) -> None:
        """Keep the fingerprint of the client's own data when the run begins, and compare it when the run is resumed.

        Raises:
            OSError: If it cannot be read or written.
            UserError: If the data have changed.
        """
        if not self.fingerprint_file.exists():
            whole = self.fingerprint_file.with_suffix(".part-data")
            whole.touch(PRIVATE)
            whole.write_text(fingerprint, encoding="utf-8")
            replace(whole, self.fingerprint_file)
        elif self.fingerprint_file.read_text(encoding="utf-8") != fingerprint:
            raise UserError(
                "--node-config data: it changed since this run began. Fix: put the old data back, or start a new run"
            )

    def remove_stale(self) -> None:
        """Remove client state of other runs that none has changed for ``STALE_SECONDS``. Raises ``OSError``."""
        if self.fingerprint_file.exists():
            self.fingerprint_file.touch()  # so that no other run removes it
        for path in self.state_file.parent.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another run's process removed it
                ours = path.name.startswith(f"{self.run}-") or not path.is_file()
                if not ours and time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    def read(self, now: Moment) -> Tensors:
        """Return the client state of the run at ``now``, empty if there is none.

        Raises:
            ClientStateError: If no file fits, and one is damaged or the server knows of newer client state.
        """
        faults = list[ClientStateError]()
        for path in (self.state_file, self.checkpoint_state_file):
            if not path.exists():
                continue
            try:
                tensors, (sitting, server_round) = self._read(path)
            except ClientStateError as error:  # the other file may be the one that a resumed run needs
                faults.append(error)
                continue
            if now.holds(sitting, server_round):
                if server_round >= now.known:
                    return tensors
                faults.append(ClientStateError(f"{path} is of round {server_round}, not of round {now.known}"))
        if faults:
            raise faults[0]
        if now.known:
            raise ClientStateError(f"{self.state_file} of round {now.known} is not there")
        return {}

    def write(self, tensors: Tensors, now: Moment) -> None:
        """Replace the client state, and wait until it is on the disk. After a crash either the old or the new one is there.

        The state of the last checkpoint, from which the run may resume, is kept in addition.

        Raises:
            OSError: If it cannot be written. The old state is then kept.
        """
        self.state_file.parent.mkdir(parents=True, exist_ok=True)
        about = {**self._identity, "sitting": now.sitting, "round": str(now.server_round)}
        about["sha256"] = _digest(tensors, about)
        new = self.state_file.with_suffix(".part")
        try:
            write(new, tensors, about, PRIVATE)
            if self._is_of_checkpoint(now):
                whole = self.state_file.with_suffix(".part-kept")
                replace(copy_private(self.state_file, whole), self.checkpoint_state_file)
            replace(new, self.state_file)
        except OSError:
            new.unlink(missing_ok=True)
            self.state_file.with_suffix(".part-kept").unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Delete the client state."""
        self.state_file.unlink(missing_ok=True)
        self.checkpoint_state_file.unlink(missing_ok=True)
        self.fingerprint_file.unlink(missing_ok=True)

    def _read(self, path: Path) -> tuple[Tensors, tuple[str, int]]:
        """Return the tensors in a file of client state, and the attempt and round that wrote them."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata() or {}
            tensors = read(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise ClientStateError(f"{path} is damaged ({error})") from error
        for key, value in self._identity.items():
            if header.get(key) != value:
                raise ClientStateError(f"{path} is of another {key}: {header.get(key)}, not {value}")
        if header.pop("sha256", None) != _digest(tensors, header):
            raise ClientStateError(f"{path} is damaged (its checksum does not fit)")
        return tensors, (header["sitting"], int(header["round"]))

    def _is_of_checkpoint(self, now: Moment) -> bool:
        """Return whether the client state that is about to be replaced is the one of the last checkpoint."""
        if now.checkpoint is None or not self.state_file.exists():
            return False
        try:
            _, (sitting, server_round) = self._read(self.state_file)
        except ClientStateError:
            return False
        return now.holds(sitting, server_round) and server_round <= now.checkpoint

    @property
    def _identity(self) -> dict[str, str]:
        return {"run": self.run, "client": str(self.client), "method": self.method}


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Return a checksum of names, types, shapes, values and header, because safetensors has none."""
    found = hashlib.sha256(repr(sorted(about.items())).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(raw(value))
    return found.hexdigest()
