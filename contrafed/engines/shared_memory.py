"""Exchange broadcasts and replies between the driver and the workers of its machine in memory that both map.

Ray's object store does the same, but more slowly. Its memory moves from round to round, new pages of shared memory are slow to
get, and a worker asks for each reference first. Here the same pages serve every round.
"""

import copyreg
import mmap
import os
import pickle
import uuid
import weakref
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord

from contrafed.core import codec

ALIGNMENT_BYTES = 64
# Blocks for replies that a worker keeps mapped. Mapping a new one costs a page fault per 4 KiB.
MAX_MAPPED_BLOCKS = 8


Address = tuple[str, str, int]  # path of a block, its name, its size in bytes
Places = Sequence[tuple[int, int]]  # first byte and length of each buffer of a pickled object


class Block:
    """A block of shared memory of the driver. Either one worker at a time writes to it, or all read what the driver wrote."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"contrafed-{uuid.uuid4().hex}"
        self.fd = os.memfd_create(self.name)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        # What a worker needs to find it. The name is needed because file numbers are reused, and differ on another machine.
        self.address: Address = (f"/proc/{os.getpid()}/fd/{self.fd}", self.name, size)

    def read(self, body: bytes, places: Places, done: Callable[[], None]) -> Any:
        """Return the object that ``write`` wrote. ``done`` is called when nothing reads this memory any more."""
        value, whole = _load(self.memory, body, places)
        weakref.finalize(whole, done)
        return value

    def close(self) -> None:
        """Release the memory as soon as nothing reads it."""
        os.close(self.fd)


class Pool:
    """The driver's blocks. Sizes follow the observed sizes of replies, and ``limit`` bounds their sum in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.wanted = 0  # bytes of a reply
        self.blocks: list[Block] = []
        self.free: list[Block] = []

    def take(self, count: int) -> Block | None:
        """Return a block for a batch of ``count`` replies, None if their size is unknown or the limit is reached."""
        # Rounded up, because batches differ by a few replies. Pages that were never written take no memory.
        size = 1 << (self.wanted * count - 1).bit_length()
        if not self.wanted or size > self.limit:
            return None
        for block in [block for block in self.free if block.size < self.wanted]:
            self.drop(block)
        fitting = [block for block in self.free if block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: block.size)
            self.free.remove(block)
            return block
        while self.free and self._total() + size > self.limit:
            self.drop(self.free[-1])
        if self._total() + size > self.limit:
            return None
        block = Block(size)
        self.blocks.append(block)
        return block

    def _total(self) -> int:
        return sum(block.size for block in self.blocks)

    def give_back(self, block: Block) -> None:
        """Mark a block as free."""
        if block in self.blocks:
            self.free.append(block)

    def drop(self, block: Block) -> None:
        """Never use a block again, because a worker that was told to stop may still write to it."""
        self.blocks.remove(block)
        if block in self.free:
            self.free.remove(block)
        block.close()

    def close(self) -> None:
        """Drop every block. Blocks that are still read stay until they are not."""
        for block in list(self.blocks):
            self.drop(block)


class BroadcastHandle(NamedTuple):
    """What a worker needs to read a broadcast."""

    address: Address
    body: bytes
    places: Places


class Broadcast:
    """The block from which every worker of this machine reads the broadcast."""

    def __init__(self, limit: int) -> None:
        """Allocate the block. Broadcasts of more than ``limit`` bytes do not use it."""
        self.limit = limit
        self.block = Block(1) if limit else None

    @property
    def address(self) -> Address | None:
        """The address by which a worker finds out whether it is on this machine, None without such memory."""
        return None if self.block is None else self.block.address

    def write(self, value: Any) -> BroadcastHandle | None:
        """Write ``value`` into the block in place of its content. Returns None if it does not fit."""
        if self.block is None:
            return None
        body, views, places, size = _pack(value)
        if size > self.limit:
            return None
        if size > self.block.size:
            self.renew(size)
        _copy(views, places, self.block.memory)
        return BroadcastHandle(self.block.address, body, places)

    def renew(self, size: int | None = None) -> None:
        """Use another block from now on, because this one is still read or too small."""
        if self.block is not None:
            self.block.close()
            self.block = Block(size or self.block.size)

    def close(self) -> None:
        """Release the memory as soon as nothing reads it."""
        if self.block is not None:
            self.block.close()
            self.block = None


def write(value: Any, address: Address | None, mapped: dict[str, mmap.mmap]) -> tuple[Any, ...]:
    """Write ``value`` into the block at ``address``.

    Args:
        value: The value.
        address: The block, or None.
        mapped: Blocks that this process has mapped.

    Returns:
        ``("shared", body, places)``. A value without buffers needs no block. ``("whole", value, bytes)`` without a large enough
        block, with the bytes that it would need.
    """
    body, views, places, size = _pack(value)
    if not views:
        return "shared", body, places
    memory = _map(address, mapped) if address is not None and size <= address[2] else None
    if memory is None:
        return "whole", value, size
    _copy(views, places, memory)
    return "shared", body, places


def read(handle: BroadcastHandle, mapped: dict[str, mmap.mmap]) -> tuple[Any, Callable[[], bool]]:
    """Return a broadcast's value, and a function that tells whether anything still reads it.

    Args:
        handle: The broadcast.
        mapped: The block of the last broadcast, which this one replaces.

    Raises:
        OSError: If the memory is out of reach.
    """
    memory = _map(handle.address, mapped, keep=1)
    if memory is None:
        raise OSError(f"shared memory {handle.address[1]} is out of reach")
    value, whole = _load(memory, handle.body, handle.places)
    watched = weakref.ref(whole)
    return value, lambda: watched() is not None


def reachable(address: Address | None) -> bool:
    """Return whether this process can map the block at ``address``."""
    return address is not None and _map(address, {}) is not None


def _pack(value: Any) -> tuple[bytes, list[memoryview], list[tuple[int, int]], int]:
    """Return ``value`` pickled without its buffers, the buffers, their places in a block, and the bytes they take there."""
    buffers: list[pickle.PickleBuffer] = []
    file = BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: codec.reduce_record}
    pickler.dump(value)
    views = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for view in views:
        places.append((end, view.nbytes))
        end += -(-view.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return file.getvalue(), views, places, end


def _copy(views: list[memoryview], places: Places, memory: mmap.mmap) -> None:
    target = np.frombuffer(memory, dtype=np.uint8)
    for view, (start, length) in zip(views, places, strict=True):
        target[start : start + length] = np.frombuffer(view, dtype=np.uint8)


def _load(memory: mmap.mmap, body: bytes, places: Places) -> tuple[Any, np.ndarray]:
    """Return a pickled object whose buffers are in ``memory``, read-only, and an array that exists while one is used."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole.flags.writeable = False
    return pickle.loads(body, buffers=[whole[start : start + length] for start, length in places]), whole


def _map(address: Address, mapped: dict[str, mmap.mmap], keep: int = MAX_MAPPED_BLOCKS) -> mmap.mmap | None:
    path, name, size = address
    if name not in mapped:
        try:
            if name not in os.readlink(path):
                return None
            fd = os.open(path, os.O_RDWR)
        except OSError:  # the driver is on another machine
            return None
        try:
            mapped[name] = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        while len(mapped) > keep:
            del mapped[next(iter(mapped))]
    return mapped[name]


def limit() -> int:
    """Return how many bytes of such memory may be used: an eighth of all, or none if the system does not have it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8 if hasattr(os, "memfd_create") else 0
