"""Define a stack: B clients that train together. All its tensors have a leading client axis."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from contrafed.core.codec import KnownNorm
from contrafed.core.errors import unknown
from contrafed.core.tensors import Tensors, align, select_prefix

RESERVED = ("personal/", "optimizer/")  # names in the client state that the framework writes
RESERVED_FAULT = f": names that begin with {' or '.join(RESERVED)} are the framework's. Fix: another name"


class DeadlineError(Exception):
    """The round's time limit passed while this client was training."""


class UnknownNameError(KeyError):
    """A name that the client state does not have. The message lists the names that it has."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name, self.known = name, list(known)
        super().__init__(name)

    def __str__(self) -> str:
        if not self.known:
            return f"stack.state has no '{self.name}': init_client_state returns nothing"
        return str(unknown("name in stack.state", self.name, self.known))


class ClientState(MutableMapping[str, Tensor]):
    """The client state of a stack, by name (B, ...). A tensor is stacked on first access."""

    def __init__(
        self, names: Iterable[str], find: Callable[[str], Tensor], write: Callable[[str, Tensor], None] | None = None
    ) -> None:
        """Declare the names.

        Args:
            names: Names of the state's tensors.
            find: Returns the stacked tensor (B, ...) of a name.
            write: Stores what is assigned to a name, if that is not here but where ``find`` looks.
        """
        self._found: dict[str, Tensor | None] = dict.fromkeys(names)
        self._find, self._write = find, write

    def __getitem__(self, name: str) -> Tensor:
        """Return the state of a name (B, ...). Raises ``UnknownNameError``, a ``KeyError``."""
        if name not in self._found:
            raise UnknownNameError(name, self)
        value = self._found[name]
        if value is None:
            value = self._found[name] = self._find(name)
        return value

    def __setitem__(self, name: str, value: Tensor) -> None:
        if name.startswith(RESERVED):
            raise TypeError(f"stack.state['{name}']{RESERVED_FAULT}")
        self.store({name: value})

    def __delitem__(self, name: str) -> None:
        del self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._found))

    def __len__(self) -> int:
        return len(self._found)

    def __ior__(self, other: Tensors) -> "ClientState":
        self.update(other)
        return self

    def store(self, tensors: Tensors) -> None:
        """Write tensors (B, ...), also under the names that a method may not use."""
        for name, value in tensors.items():
            if self._write is None:
                self._found[name] = value
            else:
                self._write(name, value)
                self._found[name] = None  # found again on access

    @property
    def loaded_tensors(self) -> Tensors:
        """The tensors that were accessed or written."""
        return {name: value for name, value in self._found.items() if value is not None}

    def first(self, count: int) -> "ClientState":
        """Return the state of the first ``count`` clients, as views. Writing to it writes to this one, in place or not."""

        def write(name: str, value: Tensor) -> None:
            if name in self and len(others := self[name][count:]):
                value = torch.cat([value, others])
            self.store({name: value})

        return ClientState(self._found, lambda name: self[name][:count], write)


@dataclass(repr=False)
class ClientStack:
    """B clients that are trained or evaluated together.

    Training changes ``params`` in place. They may hold more than one model (``own/encoder...``). The ``received`` tensors are
    constants of the round, by message name. ``state`` is the client state, committed afterwards.
    """

    clients: list[int]
    examples: list[np.ndarray]  # each client's training part
    server_round: int
    params: Tensors
    received: Tensors
    state: ClientState
    final: bool = False  # whether this is the run's last evaluation
    deadline: float | None = None  # a moment of time.monotonic()
    step: int = 0  # of the current phase
    steps_left: np.ndarray | None = None  # (B,) of late clients that stop early, and of others without a limit
    optimizers: set[str] = field(default_factory=set)  # purposes of the phases so far that keep their optimizer state

    def __len__(self) -> int:
        return len(self.clients)

    def __repr__(self) -> str:
        """Return clients, sizes and shapes, not the numbers."""
        tensors = {"params": self.params, "received": self.received, "state": self.state.loaded_tensors}
        lines = [f"ClientStack(clients={self.clients}, examples={self.sizes}, round={self.server_round}, step={self.step})"]
        lines += [f"  {kind}: {describe_shapes(values)}" for kind, values in tensors.items()]
        return "\n".join(lines)

    @property
    def global_model(self) -> Tensors:
        """The received shared tensors, by model name."""
        return select_prefix(self.received, "model")

    def get_state(self, name: str) -> Tensors:
        """Return the model in the client state as ``NAME/x``, in the model's order and not in the state's."""
        return {x: self.state[f"{name}/{x}"] for x in self.params if f"{name}/{x}" in self.state}

    @property
    def sizes(self) -> list[int]:
        """Each client's number of training examples."""
        return [len(part) for part in self.examples]

    def check_deadline(self) -> None:
        """Raise ``DeadlineError`` after the round's time limit."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise DeadlineError

    def add_optimizer(self, purpose: str) -> None:
        """Note a phase that keeps its optimizer state. Raises ``TypeError`` if an earlier one has the same purpose."""
        if purpose in self.optimizers:
            raise TypeError(
                f"train(purpose={purpose!r}): with keep_optimizer=true two phases of a round would share one optimizer state. "
                "Fix: another purpose for each"
            )
        self.optimizers.add(purpose)

    def limit_batches(self, planned: Sequence[int], repeat: int) -> list[int]:
        """Return how many batches of ``repeat`` steps each client trains on in a phase, at most as many as ``planned``."""
        if self.steps_left is None:
            return list(planned)
        return [min(steps, left // repeat) for steps, left in zip(planned, self.steps_left.tolist(), strict=True)]

    def count_down(self, steps: Sequence[int]) -> None:
        """Subtract each client's ``steps`` of a phase from those that it may still take in the round."""
        if self.steps_left is not None:
            self.steps_left -= np.array(steps)

    def first(self, count: int) -> "ClientStack":
        """Return the first ``count`` clients as views. Writing to them in place writes to this stack."""
        cut = {key: {n: v[:count] for n, v in getattr(self, key).items()} for key in ("params", "received")}
        part = {"clients": self.clients[:count], "examples": self.examples[:count], "state": self.state.first(count)}
        return replace(self, **cut, **part)  # type: ignore[arg-type]

    def reorder(self, order: Sequence[int]) -> "ClientStack":
        """Return the clients in another order, as copies."""
        return replace(
            self,
            clients=[self.clients[k] for k in order],
            examples=[self.examples[k] for k in order],
            params=in_order(self.params, order),
            received=in_order(self.received, order),
            state=ClientState(self.state, lambda name: in_order({name: self.state[name]}, order)[name]),
            steps_left=None if self.steps_left is None else self.steps_left[list(order)],
        )

    def scatter_back(self, other: "ClientStack", order: Sequence[int]) -> None:
        """Write the results of ``self.reorder(order)`` to this stack's rows."""
        back = np.argsort(order).tolist()
        for name, value in in_order(other.params, back).items():
            self.params[name].detach().copy_(value)
        self.state.store(in_order(other.state.loaded_tensors, back))


def describe_shapes(tensors: Mapping[str, Tensor], limit: int = 12) -> str:
    """Return names and shapes of at most ``limit`` tensors, for a reader."""
    shown = [f"{name} {tuple(value.shape)}" for name, value in list(tensors.items())[:limit]]
    return ", ".join([*shown, *([f"and {len(tensors) - limit} more"] if len(tensors) > limit else [])]) or "none"


def in_order(tensors: Tensors, order: Sequence[int]) -> Tensors:
    """Return the rows of tensors (B, ...) in another order. A row that is expanded B times stays so."""
    return {n: v if v.stride(0) == 0 else v.detach()[torch.tensor(order, device=v.device)] for n, v in tensors.items()}


def expand_like(values: Tensor, like: Tensor) -> Tensor:
    """Return one number per client (B,), shaped so that it multiplies ``like`` (B, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def stack_rows(rows: Sequence[Tensor], place: Callable[[Tensor], Tensor]) -> Tensor:
    """Stack ``rows`` as one tensor (B, ...), a copy. ``place`` moves a tensor to its device and type."""
    device = rows[0].device
    if all(row.device == device for row in rows):
        return place(torch.stack(list(rows)))  # one copy to an accelerator instead of B
    return torch.stack([place(row) for row in rows])


def expand_or_stack(rows: Sequence[Tensor], place: Callable[[Tensor], Tensor]) -> Tensor:
    """Stack ``rows`` like ``stack_rows``, for tensors that are never written to. A broadcast is one tensor expanded B times."""
    if all(row is rows[0] for row in rows):
        return align(place(rows[0])).expand(len(rows), *rows[0].shape)
    return stack_rows(rows, place)


def unstack_views(tensors: Tensors, count: int) -> list[Tensors]:
    """Return each client's tensors, as views of the stack's."""
    rows = {name: value.detach().unbind() for name, value in tensors.items()}
    return [{name: views[k] for name, views in rows.items()} for k in range(count)]


def unstack_copies(tensors: Tensors, count: int) -> list[Tensors]:
    """Return each client's tensors, as copies, because a view would keep the whole stack in memory."""
    if count == 1:
        return unstack_views(tensors, count)
    copy_rows: Any = torch.unbind_copy  # torch's type hint says that it returns nothing
    rows, rest = dict[str, Sequence[Tensor]](), Tensors()
    for name, value in tensors.items():
        if value.device.type == "cpu" and value.is_contiguous():
            rows[name] = copy_rows(value.detach())  # one call a tensor. Elsewhere B kernels
        else:
            rest[name] = value
    for dtype in {value.dtype for value in rest.values()}:
        views = {name: value.detach().unbind() for name, value in rest.items() if value.dtype == dtype}
        rows |= {name: [torch.empty_like(view) for view in some] for name, some in views.items()}
        torch._foreach_copy_([row for name in views for row in rows[name]], [view for some in views.values() for view in some])
    return [{name: rows[name][k] for name in tensors} for k in range(count)]


def compute_row_norms(tensors: Tensors, rows: Sequence[Tensors]) -> list[dict[str, KnownNorm]]:
    """Return the L2 norm of each client's row of every tensor, with one read for all.

    Args:
        tensors: Tensors (B, ...) by name.
        rows: Their rows, as views.
    """
    if not tensors:
        return [{} for _ in rows]
    norms = [torch.linalg.vector_norm(value.detach().reshape(len(rows), -1), dim=1).double() for value in tensors.values()]
    found = zip(rows, torch.stack(norms, dim=1).tolist(), strict=True)
    return [{n: KnownNorm(t, t._version, size) for (n, t), size in zip(row.items(), own, strict=True)} for row, own in found]


def each_client(function: Callable[..., Any], *args: Any) -> Any:
    """Call one client's ``function`` for every client: under ``vmap``, or directly for a single client."""
    if len(next(iter(args[0].values()))) == 1:
        return tree_map(lambda t: t.unsqueeze(0), function(*tree_map(lambda t: t.squeeze(0), args)))
    return vmap(function)(*args)


def each_image(function: Callable[[Tensors, Tensor], Any], params: Tensors, x: Tensor) -> Any:
    """Call one client's ``function`` of a model and images for every client's ``x`` (B, n, ...).

    It is called only once if all clients have the same model.
    """
    if len(x) == 1 or all(v.stride(0) == 0 for v in params.values()):
        out = function({n: v[0] for n, v in params.items()}, x.flatten(0, 1))
        return tree_map(lambda t: t.unflatten(0, x.shape[:2]), out)
    return vmap(function)(params, x)
