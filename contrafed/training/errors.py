"""Report errors in a client's local update with its id, the round and the step."""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contrafed.core.registry import short_place
from contrafed.core.tensors import Tensors
from contrafed.training.client_stack import ClientStack, DeadlineError

# Messages of CUDA, cuBLAS and cuDNN about missing memory, for which torch has no type.
OUT_OF_MEMORY_MESSAGES = ("out of memory", "alloc_failed", "not_initialized", "unable to find an engine")
# After one of these errors CUDA refuses everything until the process ends.
LOST_DEVICE_MESSAGES = (
    "device-side assert",
    "illegal memory access",
    "misaligned address",
    "illegal instruction",
    "launch failure",
)
# Torch's words -> what they mean to the author of a method.
TORCH_HINTS = {
    "modified by an inplace operation": (
        "an in-place edit changed a tensor that the gradient needs. Fix: make a new one, such as x = x + 1 in place of x += 1; "
        "contrafed check names the line"
    ),
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "an in-place edit of parameters that train. Fix: work on value.clone(), or under torch.no_grad() outside of a loss"
    ),
    "backward through the graph a second time": (
        "a tensor that was kept from an earlier step still has its graph. Fix: keep value.detach()"
    ),
}
TORCH, HERE = Path(torch.__file__).parent, Path(__file__).parent
# Code that methods call, and that calls methods. A mistake appears in it but has its cause elsewhere.
TOOLS = (HERE, HERE.parent / "core" / "split_model.py")


class LocalError(Exception):
    """A client's local update failed. The message names client, round and step, and the line of code."""


class ReturnError(TypeError):
    """A function of a method returned a wrong result or wrote a wrong client state. ``place`` is where it is defined."""

    def __init__(self, function: Callable[..., Any], wanted: str, verb: Literal["return", "keep", "report"] = "return") -> None:
        function = getattr(function, "func", function)  # for a functools.partial
        code = getattr(function, "__code__", None)
        self.place = "" if code is None else short_place(code.co_filename, code.co_firstlineno)
        super().__init__(f"{getattr(function, '__qualname__', function)} must {verb} {wanted}")


def kind_of(value: Any) -> str:
    """Describe a value in words: the shape of a tensor, or the type of anything else."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class NoRoomError(LocalError):
    """A local update did not fit in the accelerator's memory."""


def divergence(losses: Sequence[Any], tensors: Tensors, count: int) -> list[str]:
    """Find where each client's loss or tensors stopped being finite.

    Args:
        losses: Losses of the round's phases.
        tensors: The tensors after training (B, ...).
        count: B.

    Returns:
        A description for each client, empty if all is finite.
    """
    found = [""] * count
    for number, phase in enumerate(losses, 1):
        where, table = f"phase {number}, " if len(losses) > 1 else "", phase.tables.get("loss")
        if table is None or bool(table.isfinite().all()):
            continue
        for client, row in enumerate(table.tolist()):
            step = next((step for step, value in enumerate(row) if not math.isfinite(value)), None)
            if step is not None and not found[client]:
                found[client] = f"{where}step {step}, loss {row[step]}"
    for client, finite in enumerate(_finite(tensors, count)):
        if not finite and not found[client]:
            last = f"step {losses[-1].steps[client] - 1}, loss {float(losses[-1].last('loss')[client])}: " if losses else ""
            found[client] = f"{last}its weights are not finite"
    return found


def _finite(tensors: Tensors, count: int) -> list[bool]:
    """Return whether each client's rows of tensors (B, ...) are finite."""
    rows = [value.detach().reshape(count, -1) for value in tensors.values() if value.numel() and value.is_floating_point()]
    if not rows:
        return [True] * count
    # NaN is its own minimum and maximum. All are read at once, because on a GPU each read waits. aminmax is 15 times slower on
    # a CPU.
    ends = torch.stack([end for row in rows for end in (row.amin(dim=1), row.amax(dim=1))])
    return ends.isfinite().all(0).tolist()


@contextmanager
def locate_errors(clients: Sequence[int], server_round: int, stacks: Sequence[ClientStack], doing: str = "") -> Iterator[None]:
    """Raise any error as a ``LocalError`` that names clients, round and step. ``stacks`` has the stack once it is open."""
    try:
        yield
    except DeadlineError:
        raise
    except Exception as error:
        step = stacks[0].step if stacks else 0
        where = f"client {', '.join(map(str, clients))}, round {server_round}{doing}, step {step}"
        said = f"{where}: {type(error).__name__}: {translate_hint(error)}"
        raise (NoRoomError(said) if _out_of_memory(error) else LocalError(f"{said} ({_locate_mistake(error)})")) from error


def translate_hint(error: Exception) -> str:
    """Return an error's text, with torch's hints about gradients in plain words."""
    said = str(error)
    return (
        next((plain for words, plain in TORCH_HINTS.items() if words in said), said)
        if isinstance(error, RuntimeError)
        else said
    )


def _locate_mistake(error: Exception) -> str:
    """Return file and line of a mistake: the innermost outside torch and, if there is one, outside ``TOOLS``."""
    if isinstance(error, ReturnError) and error.place:
        return error.place
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not Path(f.filename).is_relative_to(TORCH)] or frames
    own = [f for f in outside if not any(Path(f.filename).is_relative_to(tool) for tool in TOOLS)] or outside
    return short_place(own[-1].filename, own[-1].lineno)


def device_lost(error: BaseException) -> bool:
    """Return whether an error on a GPU means that this process can no longer use it."""
    said = str(error).lower()
    return "cuda error" in said and any(words in said for words in LOST_DEVICE_MESSAGES)


def _out_of_memory(error: Exception) -> bool:
    """Return whether an accelerator's memory is full."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(w in said for w in OUT_OF_MEMORY_MESSAGES)
    )
