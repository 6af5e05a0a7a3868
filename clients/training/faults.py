"""What may go wrong on a node, said with its number, the round and the step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from clients.training.stack import DeadlineError, Stack

# What CUDA, cuBLAS and cuDNN say for want of memory where torch has no type for it.
NO_ROOM = ("out of memory", "alloc_failed", "unable to find an engine")


class LocalError(Exception):
    """A node's work failed; the message names node, round and step."""


class NoRoomError(LocalError):
    """A node's work did not fit the accelerator's memory."""


@contextmanager
def named(nodes: Sequence[int], server_round: int, stacks: Sequence[Stack], doing: str = "") -> Iterator[None]:
    """Raise whatever goes wrong as a ``LocalError`` that says where; ``stacks`` has the stack once it is open."""
    try:
        yield
    except DeadlineError:
        raise
    except Exception as error:
        step = stacks[0].step if stacks else 0
        where = f"node {', '.join(map(str, nodes))}, round {server_round}{doing}, step {step}"
        kind = NoRoomError if _out_of_memory(error) else LocalError
        raise kind(f"{where}: {type(error).__name__}: {error}") from error


def _out_of_memory(error: Exception) -> bool:
    """Whether an accelerator's memory is full."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(w in said for w in NO_ROOM))
