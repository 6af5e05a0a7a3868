"""Compare a strategy's attributes. A checkpoint holds only ``self.state``, so a resumed run would lose changes of others."""

import io
import pickle
import weakref
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Values of a tensor or an array that are compared. Of a larger one these are spread evenly.
MAX_COMPARED_VALUES = 2**16

FIX = "Fix: keep it in self.state, or begin it in setup() and set it back in aggregate"


class PlannedRounds:
    """The number of a run's rounds, and whether its method has read it. Only if it has not, the number may change."""

    def __init__(self, count: int) -> None:
        """Begin with a number that no method has read."""
        self.count, self.is_read = count, False

    def read(self) -> int:
        """Return the number for a method."""
        self.is_read = True
        return self.count


class Attributes:
    """The attributes of a strategy by their origin: those of its base class, and those of its author."""

    def __init__(self, strategy: Any) -> None:
        """Note the attributes that the base class has set, before ``setup``."""
        self._strategy, self._base = strategy, dict(vars(strategy))
        self._names: set[str] | None = None  # before the first round
        self._begun: dict[str, Any] = {}
        self.lent: list[weakref.ref[Tensor]] = []  # of earlier rounds, tensors that clients may hold as well

    def find_setup_fault(self) -> str:
        """Return which attribute of the base class ``setup`` or the class replaces, empty if it is none."""
        kind, state = type(self._strategy), self._strategy.state
        if not isinstance(state, dict):
            return f"{kind.__name__}: self.state must be a dictionary, got {type(state).__name__}"
        base, *classes = _split(kind)
        own = {name for parent in classes for name in vars(parent)}
        hidden = {name for name in self._base.keys() & own if not hasattr(base, name)} | self._find_replaced(self._base)
        hidden |= {n for n, v in self._own().items() if callable(getattr(kind, n, None)) and not callable(v)}
        return self._describe(hidden)

    def find_replaced_fault(self, before: dict[str, Any]) -> str:
        """Return which attribute of the base class has been replaced since ``before``, empty if it is none."""
        return self._describe(self._find_replaced(before))

    def _describe(self, hidden: set[str]) -> str:
        what = "is taken, and a strategy may not replace it. Fix: another name for this attribute"
        return f"{type(self._strategy).__name__}: self.{min(hidden)} {what}" if hidden else ""

    def _find_replaced(self, before: dict[str, Any]) -> set[str]:
        """Return the attributes of the base class that are other objects than ``before``. A state may be."""
        now = vars(self._strategy)
        return {name for name in self._base.keys() - {"state"} if now.get(name) is not before.get(name)}

    def mark(self) -> None:
        """Note what the author's attributes are before the first round, and before a trial of the strategy."""
        if self._names is None:
            self._names, self._begun = {*vars(self._strategy)}, self._read()

    def find_new(self) -> str:
        """Return an attribute that was created after ``mark``, as a fault. Empty without one."""
        new = vars(self._strategy).keys() - (self._names or vars(self._strategy).keys())
        return f"{type(self._strategy).__name__}: no checkpoint holds self.{min(new)}. {FIX}" if new else ""

    def find_changed(self) -> str:
        """Return an attribute that has another value than at ``mark``, as a fault. Empty without one."""
        now = {} if self._names is None else self._read()
        changed = [name for name, value in self._begun.items() if not _same(now.get(name), value)]
        name = f"{type(self._strategy).__name__}: a round changed self.{min(changed)}" if changed else ""
        return name and f"{name}, which no checkpoint holds. {FIX}"

    def _own(self) -> dict[str, Any]:
        return {n: v for n, v in vars(self._strategy).items() if n not in self._base and v is not self}

    def _read(self) -> dict[str, Any]:
        """Return the content of the author's attributes, of the object and of its classes, by name."""
        strategy, found = self._strategy, dict[str, Any]()
        for kind in reversed(_split(type(strategy))[1:]):
            if not _is_ours(kind):
                found |= {name: value for name, value in vars(kind).items() if not name.startswith("__")}
        found |= self._own()
        if not found:
            return found
        # A checkpoint fills the tables of the state in place, so that an attribute may refer to one.
        tables = [table for table in strategy.state.values() if isinstance(table, dict)]
        known = {id(part) for part in (strategy, strategy.state, strategy.participation, *tables)}
        return {name: _content(value, known) for name, value in found.items()}


class _Writer(pickle.Pickler):
    """Writes a value: the content of tensors and arrays, and the identity of the framework's objects."""

    def __init__(self, file: io.BytesIO, known: Collection[int]) -> None:
        super().__init__(file)
        self.fast, self._known = True, known  # two equal texts are written alike, whether they are one object or two

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in place of a value, None for the value itself."""
        if isinstance(value, Tensor):
            values = value.detach().reshape(-1)[:: _step(value.numel())].contiguous().cpu()
            return str(value.dtype), tuple(value.shape), values.view(torch.uint8).numpy().tobytes()
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.dtype.str, value.shape, value.reshape(-1)[:: _step(value.size)].tobytes()
        return id(value) if id(value) in self._known or _is_ours(type(value)) else None


def _content(value: Any, known: Collection[int]) -> Any:
    """Return the content of a value as bytes, or the value itself if Python cannot write it."""
    file = io.BytesIO()
    try:
        _Writer(file, known).dump(value)
    except Exception:  # an author's object may raise any error
        return value
    return file.getvalue()


def _step(size: int) -> int:
    return max(1, size // MAX_COMPARED_VALUES)


def _same(now: Any, begun: Any) -> bool:
    return now is begun or (isinstance(begun, bytes) and isinstance(now, bytes) and now == begun)


def _split(kind: type) -> list[type]:
    """Return the base class of all strategies, and the classes between it and ``kind``, ``kind`` first."""
    classes = kind.__mro__
    place = next(place for place, parent in enumerate(classes) if parent.__name__ == "FederatedStrategy")
    return [classes[place], *classes[:place]]


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "contrafed"
