"""Replies between a worker and the driver on one machine: written once into memory that both see, read in place.

Ray's object store does the same, but its memory moves from round to round, and fresh pages of shared memory are slow to get.
Here the same pages serve every round.
"""

import mmap
import os
import pickle
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64
# A worker keeps this many blocks mapped; mapping one anew costs a page fault per 4 KiB.
MAPPED = 4


class Block:
    """A stretch of shared memory that belongs to the driver and that one worker at a time writes to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.name = f"contrafed-{uuid.uuid4().hex}"
        self.fd = os.memfd_create(self.name)
        os.ftruncate(self.fd, size)
        self.memory = mmap.mmap(self.fd, size, access=mmap.ACCESS_READ)
        # What a worker needs to find it; the name because numbers are used again, and mean others on another machine.
        self.address = (f"/proc/{os.getpid()}/fd/{self.fd}", self.name, size)

    def read(self, body: bytes, places: Sequence[tuple[int, int]], done: Callable[[], None]) -> Any:
        """Return the object that ``write`` wrote; ``done`` is called when nothing reads this memory any more."""
        whole = np.frombuffer(self.memory, dtype=np.uint8)
        weakref.finalize(whole, done)
        return pickle.loads(body, buffers=[whole[start : start + length] for start, length in places])

    def close(self) -> None:
        """Give the memory back as soon as nobody reads it."""
        os.close(self.fd)


class Pool:
    """The driver's blocks. Sizes follow what replies turned out to need; ``limit`` bounds their sum in bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.wanted = 0
        self.blocks: list[Block] = []
        self.free: list[Block] = []

    def take(self) -> Block | None:
        """Return a block for one batch of replies; None when nothing is known of their size or the limit is reached."""
        while self.free:
            block = self.free.pop()
            if block.size >= self.wanted:
                return block
            self.drop(block)
        if not self.wanted or sum(block.size for block in self.blocks) + self.wanted > self.limit:
            return None
        block = Block(self.wanted)
        self.blocks.append(block)
        return block

    def give_back(self, block: Block) -> None:
        """Let a block be used again."""
        if block in self.blocks:
            self.free.append(block)

    def drop(self, block: Block) -> None:
        """Never use a block again: a worker that was told to stop may still write to it."""
        self.blocks.remove(block)
        block.close()

    def close(self) -> None:
        """Drop every block; what is still being read stays until it is not."""
        for block in list(self.blocks):
            self.drop(block)
        self.free.clear()


def write(value: Any, address: tuple[str, str, int] | None, mapped: dict[str, mmap.mmap]) -> tuple[Any, ...]:
    """Put ``value`` into the block at ``address``: ``("shared", body, places)``.

    Where that cannot be done, because there is no block or it is too small, the value itself: ``("whole", value, bytes)``,
    with the bytes a block would need. ``mapped`` are the blocks that this process has mapped.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    places, end = [], 0
    for view in views:
        places.append((end, view.nbytes))
        end += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
    memory = _map(address, mapped) if address is not None and end <= address[2] else None
    if memory is None:
        return "whole", value, end
    target = np.frombuffer(memory, dtype=np.uint8)
    for view, (start, length) in zip(views, places, strict=True):
        target[start : start + length] = np.frombuffer(view, dtype=np.uint8)
    return "shared", body, places


def _map(address: tuple[str, str, int], mapped: dict[str, mmap.mmap]) -> mmap.mmap | None:
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
        while len(mapped) > MAPPED:
            del mapped[next(iter(mapped))]
    return mapped[name]


def limit() -> int:
    """Return how many bytes replies may take: an eighth of the memory, or none where the system has no such memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8 if hasattr(os, "memfd_create") else 0
