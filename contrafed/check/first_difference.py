"""Find the author's first line that computes another value in one call than in another one."""

import inspect
import re
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from contrafed.check.fault import find_difference
from contrafed.check.lines import Author, place_of
from contrafed.core.registry import short_place
from contrafed.core.tensors import unwrap

# Return the part of a tensor that is compared, None for none.
Pick = Callable[[Tensor], Tensor | None]
Line = tuple[str, dict[str, Tensor]]  # an author's line, and the values of the local variables after it


def first_difference(author: Author, one: tuple[Callable[[], Any], Pick], other: tuple[Callable[[], Any], Pick]) -> str:
    """Make two calls, and return the author's first line after which a local variable differs. It is empty if none does.

    Args:
        author: The author.
        one: A call, and which part of a tensor is compared. Stacks are given as ``vmap`` holds them, clients first.
        other: The other call.
    """
    for (place, first), (other_place, second) in zip(_record(author, *one), _record(author, *other), strict=False):
        names = first.keys() & second.keys()
        if place != other_place or find_difference({n: first[n] for n in names}, {n: second[n] for n in names}, "result"):
            return place
    return ""


def _record(author: Author, call: Callable[[], Any], pick: Pick) -> list[Line]:
    """Make a call, and return the author's lines in their order. Errors of the call are dropped."""
    lines, last = list[Line](), dict[int, int]()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        key = id(frame)
        if event != "call" and key in last:
            named = dict(frame.f_locals)
            if event == "return":
                named |= argument if isinstance(argument, dict) else {"": argument}
            parts = {name: pick(unwrap(value)) for name, value in named.items() if isinstance(value, Tensor)}
            kept = {name: part.detach().clone() for name, part in parts.items() if part is not None}
            lines.append((short_place(frame.f_code.co_filename, last[key]), kept))
        last.pop(key, None) if event in ("call", "return") else last.update({key: frame.f_lineno})
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local(frame, event, argument) if author.wrote(frame.f_code.co_filename) else None

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Exception:  # reported by the check that the work runs at all
        return lines
    finally:
        sys.settrace(tracing)
    return lines


def line_of_attribute(kind: type, name: str) -> str:
    """Return the author's line that sets ``self.NAME`` in a class, else the place of the class."""
    try:
        source, first = inspect.getsourcelines(kind)
    except (TypeError, OSError):
        return place_of(kind)
    found = [k for k, line in enumerate(source) if re.search(rf"\bself\.{re.escape(name)}\s*[:=]", line)]
    return short_place(inspect.getfile(kind), first + found[0]) if found else place_of(kind)
