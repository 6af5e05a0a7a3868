"""What virtual nodes remember, on three tiers: the accelerator, this machine's memory, its disk."""

import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from contrafed.core.disk import FAILING
from contrafed.core.errors import UserError
from contrafed.core.tensors import PRIVATE, Tensors, on_host, read, size_of, write

DEVICE, HOST, DISK = "device", "host", "disk"
# Of the memory that is there when a run starts, the share that nodes' memories may take.
SHARE = 0.5


class Cost(NamedTuple):
    """What the nodes' memories took since it was last asked for: seconds of moving them, and bytes on each tier now."""

    seconds: float
    device: int
    host: int
    disk: int


class NodeMemory:
    """Memories by node, each whole on one tier. The one that was trained longest ago moves down when a tier is over its budget.

    A node's memory arrives where it was trained and stays there while there is room; what lies on disk is read when the node
    takes part again. The files are gone when the run ends.
    """

    def __init__(self, device_bytes: int, host_bytes: int, folder: str | None) -> None:
        """Keep at most ``device_bytes`` on accelerators and ``host_bytes`` in RAM; the rest in a new folder in ``folder``.

        None is the system's folder for temporary files.
        """
        self.budget = {DEVICE: device_bytes, HOST: host_bytes}
        self.used = {DEVICE: 0, HOST: 0, DISK: 0}
        self._held: dict[str, OrderedDict[int, Tensors]] = {DEVICE: OrderedDict(), HOST: OrderedDict()}  # oldest first
        self._files: dict[int, int] = {}  # node -> bytes, of those on disk
        self._parent = folder
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        return iter([*self._held[DEVICE], *self._held[HOST], *self._files])

    def get(self, node: int) -> Tensors:
        """Return what a node remembers, wherever it is; empty for one that remembers nothing. Never write to it."""
        for held in self._held.values():
            if node in held:
                return held[node]
        if node in self._files:
            began = time.perf_counter()
            found = read(self._file(node))
            self._seconds += time.perf_counter() - began
            return found
        return {}

    def put(self, node: int, memory: Tensors) -> None:
        """Replace what a node remembers."""
        self._drop(node)
        on_device = any(value.device.type != "cpu" for value in memory.values())
        self._place(DEVICE if on_device else HOST, node, memory)
        began = time.perf_counter()
        self._fit()
        self._seconds += time.perf_counter() - began

    def cost(self) -> Cost:
        """Return what it took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return Cost(seconds, self.used[DEVICE], self.used[HOST], self.used[DISK])

    def clear(self) -> None:
        """Forget everything and delete the files."""
        for held in self._held.values():
            held.clear()
        self._files.clear()
        self.used = dict.fromkeys(self.used, 0)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _place(self, tier: str, node: int, memory: Tensors) -> None:
        self._held[tier][node] = memory
        self.used[tier] += size_of(memory)

    def _fit(self) -> None:
        while self.used[DEVICE] > self.budget[DEVICE]:
            node, memory = self._held[DEVICE].popitem(last=False)
            self.used[DEVICE] -= size_of(memory)
            self._place(HOST, node, on_host(memory))
        while self.used[HOST] > self.budget[HOST]:
            node, memory = self._held[HOST].popitem(last=False)
            self.used[HOST] -= size_of(memory)
            try:
                write(self._file(node), memory, mode=PRIVATE)
            except OSError as error:
                if error.errno in FAILING:
                    error.filename = error.filename or str(self._parent or tempfile.gettempdir())
                    raise
                raise UserError(f"engine.memory_folder: cannot write what nodes remember ({error})") from error
            self._files[node] = size_of(memory)
            self.used[DISK] += self._files[node]

    def _drop(self, node: int) -> None:
        for tier, held in self._held.items():
            if node in held:
                self.used[tier] -= size_of(held.pop(node))
        if node in self._files:
            self.used[DISK] -= self._files.pop(node)
            self._file(node).unlink()

    def _file(self, node: int) -> Path:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="contrafed-", dir=self._parent)
        return Path(self._folder.name) / f"{node}.safetensors"


def default_budgets(device: str) -> tuple[int, int]:
    """Return a share of what is free on ``device`` (0 on a CPU), and of what is available of this machine's RAM."""
    free = 0
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # what torch keeps of the run before in this process does not count as free
        free = torch.cuda.mem_get_info(device)[0]
    return int(SHARE * free), int(SHARE * _available())


def _available(container: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes of RAM there are for this process: the machine's, or those that its container leaves it."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # no Linux
        return 8 << 30
    try:
        limit, used = (int((container / f"memory.{name}").read_text()) for name in ("max", "current"))
        counts = dict(line.split() for line in (container / "memory.stat").read_text().splitlines())
        return min(free, limit - used + int(counts["inactive_file"]))  # pages of files give way
    except (OSError, KeyError, ValueError):  # no container, or one without a limit
        return free
