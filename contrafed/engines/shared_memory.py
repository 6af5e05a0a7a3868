"""Broadcasts and replies between the driver and the workers of its machine: written once into memory that both see.

Ray's object store does the same, but its memory moves from round to round, fresh pages of shared memory are slow to get, and
a worker that is sent a reference first asks for it. Here the same pages serve every round.
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

ALIGNMENT = 64
# A worker keeps this many blocks for replies mapped; mapping one anew costs a page fault per 4 KiB.
MAPPED = 8


Address = tuple[str, str, int]  # where a block is found, its name, its size in bytes
Places = Sequence[tuple[int, int]]  # first byte and length of each buffer of a pickled object


class Block:
    """A stretch of shared memory that belongs to the driver: one worker at a time writes to it, or all read what it wrote."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"contrafed-{uuid.uuid4().hex}"
        self.fd = os.memfd_create(self.name)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size)
        # What a worker needs to find it; the name because numbers are used again, and mean others on another machine.
        self.address: Address = (f"/proc/{os.getpid()}/fd/{self.fd}", self.name, size)

    def read(self, body: bytes, places: Places, done: Callable[[], None]) -> Any:
        """Return the object that ``write`` wrote; ``done`` is called when nothing reads this memory any more."""
        value, whole = _load(self.memory, body, places)
        weakref.finalize(whole, done)
        return value

    def close(self) -> None:
        """Give the memory back as soon as nobody reads it."""
        os.close(self.fd)


class Pool:
    """The driver's blocks. Sizes follow what replies turned out to need; ``limit`` bounds their sum in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.wanted = 0  # bytes of a reply
        self.blocks: list[Block] = []
        self.free: list[Block] = []

    def take(self, count: int) -> Block | None:
        """Return a block for a batch of so many replies; None when nothing is known of their size or the limit is reached."""
        # Rounded up, since batches differ by a few replies; pages that nobody wrote to take no memory.
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
        """Let a block be used again."""
        if block in self.blocks:
            self.free.append(block)

    def drop(self, block: Block) -> None:
        """Never use a block again: a worker that was told to stop may still write to it."""
        self.blocks.remove(block)
        if block in self.free:
            self.free.remove(block)
        block.close()

    def close(self) -> None:
        """Drop every block; what is still being read stays until it is not."""
        for block in list(self.blocks):
            self.drop(block)


class BroadcastHandle(NamedTuple):
    """What a worker needs to read a broadcast."""

    address: Address
    body: bytes
    places: Places


class Broadcast:
    """The block from which every worker of this machine reads what they are all sent."""

    def __init__(self, limit: int) -> None:
        """Broadcasts of more than ``limit`` bytes are not for this memory."""
        self.limit = limit
        self.block = Block(1) if limit else None

    @property
    def address(self) -> Address | None:
        """By which a worker finds out whether it is on this machine; None where there is no such memory."""
        return None if self.block is None else self.block.address

    def write(self, value: Any) -> BroadcastHandle | None:
        """Put ``value`` into the block, over what it held; None where it is not for this memory."""
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
        """Take another block from now on: somebody still reads this one, or it is too small."""
        if self.block is not None:
            self.block.close()
            self.block = Block(size or self.block.size)

    def close(self) -> None:
        """Give the memory back as soon as nobody reads it."""
        if self.block is not None:
            self.block.close()
            self.block = None


def write(value: Any, address: Address | None, mapped: dict[str, mmap.mmap]) -> tuple[Any, ...]:
    """Put ``value`` into the block at ``address``: ``("shared", body, places)``.

    A value that has no buffers needs no block: the body is all. Where there is none, or it is too small, the value itself:
    ``("whole", value, bytes)``, with the bytes a block would need. ``mapped`` are the blocks that this process has mapped.
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
    """Return what a broadcast holds, and what tells whether anything still reads it. Raises ``OSError`` out of reach.

    ``mapped`` is the block of the last broadcast, which this replaces.
    """
    memory = _map(handle.address, mapped, keep=1)
    if memory is None:
        raise OSError(f"shared memory {handle.address[1]} is out of reach")
    value, whole = _load(memory, handle.body, handle.places)
    watched = weakref.ref(whole)
    return value, lambda: watched() is not None


def reachable(address: Address | None) -> bool:
    """Whether this process can map the block at ``address``."""
    return address is not None and _map(address, {}) is not None


def _pack(value: Any) -> tuple[bytes, list[memoryview], list[tuple[int, int]], int]:
    """Return ``value`` pickled without its buffers, these, their places in a block, and the bytes they take there."""
    buffers: list[pickle.PickleBuffer] = []
    file = BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, ArrayRecord: codec.reduce_record}
    pickler.dump(value)
    views = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for view in views:
        places.append((end, view.nbytes))
        end += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
    return file.getvalue(), views, places, end


def _copy(views: list[memoryview], places: Places, memory: mmap.mmap) -> None:
    target = np.frombuffer(memory, dtype=np.uint8)
    for view, (start, length) in zip(views, places, strict=True):
        target[start : start + length] = np.frombuffer(view, dtype=np.uint8)


def _load(memory: mmap.mmap, body: bytes, places: Places) -> tuple[Any, np.ndarray]:
    """Return a pickled object whose buffers lie in ``memory``, read-only, and an array that lives while one is used."""
    whole = np.frombuffer(memory, dtype=np.uint8)
    whole.flags.writeable = False
    return pickle.loads(body, buffers=[whole[start : start + length] for start, length in places]), whole


def _map(address: Address, mapped: dict[str, mmap.mmap], keep: int = MAPPED) -> mmap.mmap | None:
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
    """Return how many bytes may lie in memory of this kind: an eighth of all, or none where the system has no such memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8 if hasattr(os, "memfd_create") else 0
