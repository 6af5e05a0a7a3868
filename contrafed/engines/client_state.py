"""Store the state of virtual clients on three tiers: the accelerator, this machine's memory, its disk."""

import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from contrafed.core.disk import DISK_ERRNOS, PRIVATE, checksum
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.tensors import Tensors, on_host, read, size_of, write

DEVICE, HOST, DISK = "device", "host", "disk"
# Share of the memory available at the start of a run that client state may take.
MEMORY_SHARE = 0.5


class Cost(NamedTuple):
    """The cost of client state: seconds of moving it since the last call, and the bytes on each tier now."""

    seconds: float
    device: int
    host: int
    disk: int


class ClientStateStore:
    """Client states by client, each entirely on one tier.

    If a tier exceeds its budget, the least recently trained state moves down. A client's state starts on the device of its
    training and stays there while there is room. State on disk is loaded when the client participates again. The files are
    deleted at the end of the run.
    """

    def __init__(self, device_bytes: int, host_bytes: int, folder: str | None) -> None:
        """Keep at most ``device_bytes`` on accelerators and ``host_bytes`` in RAM.

        Other states are written to a new folder in ``folder``. None is the system's folder for temporary files.
        """
        self.budget = {DEVICE: device_bytes, HOST: host_bytes}
        self.used = {DEVICE: 0, HOST: 0, DISK: 0}
        self._held: dict[str, OrderedDict[int, Tensors]] = {DEVICE: OrderedDict(), HOST: OrderedDict()}  # oldest first
        self._sizes: dict[int, int] = {}  # client -> bytes of its state, on any tier
        self._files: dict[int, str] = {}  # client -> checksum, of those on disk
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        return iter([*self._held[DEVICE], *self._held[HOST], *self._files])

    def get(self, client: int) -> Tensors:
        """Return a client's state from its tier, empty if it has none. Never write to it."""
        for held in self._held.values():
            if client in held:
                return held[client]
        if client in self._files:
            began = time.perf_counter()
            found = self._read(client)
            self._seconds += time.perf_counter() - began
            return found
        return {}

    def store(self, client: int, memory: Tensors) -> None:
        """Replace a client's state."""
        self._drop(client)
        self._sizes[client] = size_of(memory)
        on_device = any(value.device.type != "cpu" for value in memory.values())
        self._store_in_tier(DEVICE if on_device else HOST, client, memory)
        began = time.perf_counter()
        self._fit()
        self._seconds += time.perf_counter() - began

    def cost(self) -> Cost:
        """Return the cost since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return Cost(seconds, self.used[DEVICE], self.used[HOST], self.used[DISK])

    def clear(self) -> None:
        """Delete all states and files."""
        for held in self._held.values():
            held.clear()
        self._files.clear()
        self._sizes.clear()
        self.used = dict.fromkeys(self.used, 0)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _store_in_tier(self, tier: str, client: int, memory: Tensors) -> None:
        self._held[tier][client] = memory
        self.used[tier] += self._sizes[client]

    def _fit(self) -> None:
        while self.used[DEVICE] > self.budget[DEVICE]:
            client, memory = self._held[DEVICE].popitem(last=False)
            self.used[DEVICE] -= self._sizes[client]
            self._store_in_tier(HOST, client, on_host(memory))
        while self.used[HOST] > self.budget[HOST]:
            client, memory = self._held[HOST].popitem(last=False)
            self.used[HOST] -= self._sizes[client]
            try:
                write(self._file(client), memory, mode=PRIVATE)
            except OSError as error:
                if error.errno in DISK_ERRNOS:
                    error.filename = error.filename or str(self._parent or tempfile.gettempdir())
                    raise
                if self._files and isinstance(error, FileNotFoundError):
                    raise _make_lost_error(self._file(client)) from error
                raise UserError(f"engine.memory_folder: cannot write client state ({error})") from error
            self._files[client] = checksum(self._file(client))
            self.used[DISK] += self._sizes[client]

    def _read(self, client: int) -> Tensors:
        """Return a client's state from the disk. Raises ``RunStopped`` unless it is what was written."""
        file = self._file(client)
        try:
            if checksum(file) == self._files[client]:
                return read(file)
        except OSError as error:
            raise _make_lost_error(file) from error
        raise _make_lost_error(file)

    def _drop(self, client: int) -> None:
        size = self._sizes.pop(client, 0)
        for tier, held in self._held.items():
            if held.pop(client, None) is not None:
                self.used[tier] -= size
        if self._files.pop(client, None) is not None:
            self.used[DISK] -= size
            self._file(client).unlink(missing_ok=True)

    def _file(self, client: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="contrafed-", dir=self._parent)
        return Path(self._folder.name) / f"{client}.safetensors"


def _make_lost_error(file: Path) -> RunStopped:
    """Return the error for a client's state that is gone or is not what was written."""
    return RunStopped(
        f"engine.memory_folder: another program removed or changed {file}, which holds client state of this run. "
        "Fix: name a folder that nothing cleans, and resume=latest"
    )


def default_budgets(device: str) -> tuple[int, int]:
    """Return a share of the free memory on ``device`` (0 on a CPU), and of this machine's available RAM."""
    free = 0
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # memory that torch keeps from an earlier run in this process would not count as free
        free = torch.cuda.mem_get_info(device)[0]
    return int(MEMORY_SHARE * free), int(MEMORY_SHARE * _available())


def _available(container: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of RAM this process can use: the machine's, or what its container allows."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # not Linux
        return 8 << 30
    try:
        limit, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counts["inactive_file"]))  # pages of files can be freed
    except (OSError, KeyError, ValueError):  # no container, or one without a limit
        return free
