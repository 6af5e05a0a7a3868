"""Check a strategy's results before they are used. Every error is one line that names the strategy."""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core import registry
from contrafed.core.errors import RunStopped, UserError, nearest
from contrafed.core.tensors import TYPES, Tensors, format_of, storable
from contrafed.server.buffers import are_sent, average_buffers, leave_out, split_replies
from contrafed.server.privacy import aggregate_privately
from contrafed.server.replies import AbsentError, Replies, norm

# The types of arrays that a checkpoint supports: those of tensors that NumPy has, in this machine's byte order.
ARRAYS = {np.dtype(str(kind).removeprefix("torch.")) for kind in TYPES if kind is not torch.bfloat16}


def select_clients(strategy: Any, server_round: int) -> np.ndarray:
    """Return the clients that a strategy selects, sorted. Raises ``RunStopped`` unless they are distinct partition ids."""
    clients, count = np.asarray(strategy.select(server_round)), strategy.population.num_clients
    got = f"{clients.dtype} {clients.shape}"
    if clients.ndim == 1 and not len(clients):
        return clients.astype(np.int64)
    if clients.ndim == 1 and clients.dtype.kind in "iu":
        clients = np.sort(clients)
        wrong = clients[(clients < 0) | (clients >= count) | (np.diff(clients, prepend=-1) == 0)]
        if not len(wrong):
            return clients
        got = str(wrong[-1])
    wanted = f"{type(strategy).__name__}.select must return partition ids, whole numbers of 0..{count - 1}, each at most once"
    raise RunStopped(f"round {server_round}: {wanted}, got {got}")


def broadcast(strategy: Any, method: Callable[[Tensors], Tensors], model: Tensors) -> Tensors:
    """Return what a strategy's ``broadcast`` makes of the parameters, and the buffers that clients receive."""
    with refuse_edits(strategy, model.values(), "broadcast"):
        shared = method(leave_out(model, strategy.buffers))
    if not strategy.buffers or not isinstance(shared, dict):
        return shared
    return shared | {f"model/{name}": model[name] for name in strategy.buffers if f"model/{name}" in strategy.broadcast_spec}


def sent_fault(strategy: Any, *parts: Any) -> str:
    """Return what is wrong with the tensors for a client, empty if nothing is. Later ``parts`` replace earlier ones."""
    name, tensors = type(strategy).__name__, dict[str, Any]()
    for part in parts:
        if not isinstance(part, dict):
            return f"{name} must send tensors by name, in a dictionary, not {_kind(part)}"
        tensors |= part
    if missing := strategy.broadcast_spec.keys() - tensors.keys():
        bare = min(missing).removeprefix("model/")
        hint = f': its {bare} goes out as add_prefix("model", ...), of contrafed.core.tensors' if bare in tensors else ""
        return f"strategy.server: the client expects {min(missing)}, which {name} does not send{hint}"
    for tensor, value in tensors.items():
        shape = strategy.broadcast_spec.get(tensor)
        if not isinstance(value, Tensor):
            return f"{name} must send tensors, but {tensor} is a {_kind(value)}"
        if shape is not None and value.shape != tuple(shape):
            expected = f"strategy.server: the client expects {tensor} of shape {tuple(shape)}"
            return f"{expected}, but {name} sends {tuple(value.shape)}"
        if tensor.startswith("model/") and not value.is_floating_point():
            return f"{name} must send models as floating-point numbers, but {tensor} is {format_of(value)}"
    if more := tensors.keys() - strategy.broadcast_spec.keys():
        return (
            f"{name} sends {min(more)}, which the client does not expect{nearest(min(more), strategy.broadcast_spec, cutoff=0)}"
        )
    return ""


def costs(strategy: Any, clients: np.ndarray) -> dict[int, int]:
    """Return how many steps each of these clients takes, by the client's ``num_local_steps``.

    Raises:
        UserError: If it fails or does not return a number, before the first round's training.
        RunStopped: The same, later.
    """
    half = strategy.client_class
    try:
        with registry.report_author_errors(f"{half.__name__}.num_local_steps", inspect.getfile(half)):
            found = {client: strategy.num_local_steps(int(strategy.population.sizes[client])) for client in clients.tolist()}
        for client, cost in found.items():
            if not isinstance(cost, int | np.integer) or isinstance(cost, bool):
                wanted = f"{half.__name__}.num_local_steps must return a whole number of steps"
                raise UserError(f"{wanted}, got {_kind(cost)} for client {client}")
    except UserError as error:
        raise build_request_error(strategy, strategy.round.server_round, str(error)) from error
    return {client: int(cost) for client, cost in found.items()}


def weights_of(strategy: Any) -> np.ndarray | None:
    """Return each client's weight in the last round (K,). Raises ``RunStopped`` for another shape or other values."""
    weights, count = strategy.client_weights(), strategy.population.num_clients
    if weights is not None and (
        not isinstance(weights, np.ndarray) or weights.shape != (count,) or weights.dtype.kind not in "iuf"
    ):
        raise build_stop_error(
            strategy, f"{type(strategy).__name__}.client_weights must return ({count},) numbers or None, got {_kind(weights)}"
        )
    return weights


def eval_model_fault(strategy: Any, model: Tensors, made: Any) -> str:
    """Return what is wrong with the model that a strategy evaluates in place of ``model``, empty if nothing is."""
    fault = _model_fault(model, made)
    if not fault and (missing := model.keys() - made.keys()):
        fault = f"{min(missing)} is missing"
    return fault and f"{type(strategy).__name__}.eval_model must return the whole model, tensors by name: {fault}"


def eval_model(strategy: Any, model: Tensors) -> Tensors:
    """Return the model that a strategy has scored in place of ``model``. Raises ``RunStopped`` where it is none."""
    weights = leave_out(model, strategy.buffers)
    with refuse_edits(strategy, model.values(), "eval_model"):
        made: Tensors = strategy.eval_model(dict(weights))
    if fault := eval_model_fault(strategy, weights, made):
        raise build_stop_error(strategy, fault)
    return {name: made.get(name, value) for name, value in model.items()} if strategy.buffers else made


def state_fault(strategy: Any) -> str:
    """Return which part of a strategy's state a checkpoint cannot hold, empty if it can hold all of it."""
    if fault := strategy._attributes.find_new():
        return str(fault)
    place = _unkept(strategy.state.items(), "self.state")
    kept = "tensors, arrays, numbers and text, in lists, tuples and dictionaries by text or whole numbers"
    return f"{type(strategy).__name__}: {place}, but a checkpoint holds {kept}" if place else ""


def _complete_received(strategy: Any) -> None:
    """Add what clients of the cohort would have received that were not asked, because they are late."""
    missing = [client for client in strategy.round.participants.tolist() if client not in strategy.received]
    shared, model = broadcast(strategy, strategy.broadcast, strategy.model) if missing else {}, strategy.model
    with refuse_edits(strategy, model.values(), "per_client_broadcast"):
        for client in missing:
            own = strategy.per_client_broadcast(dict(model), client, False)
            strategy.received[client] = shared if own is None else shared | own


def next_model(strategy: Any, replies: Replies) -> Tensors:
    """Return the next global model: the aggregated tensors in the model's types, and the other tensors unchanged.

    Raises:
        RunStopped: If it is not a model or not finite, or if the strategy's state or metrics cannot be saved or logged. Also if
            the strategy changed tensors in place, or attributes.
    """
    name, whole, attributes = type(strategy).__name__, strategy.model, dict(vars(strategy))
    model = leave_out(whole, strategy.buffers)
    if buffers_sent := are_sent(strategy):
        replies, sent = split_replies(replies, strategy.buffers)
    if strategy.privacy:
        _complete_received(strategy)
    with refuse_edits(strategy, _list_lent(strategy, replies), "aggregate"):
        try:
            made = (aggregate_privately if strategy.privacy else type(strategy).next_model)(strategy, dict(model), replies)
        except AbsentError as error:
            raise build_stop_error(strategy, f"{name}.aggregate: {error}") from error
    strategy.round.largest_share = replies.largest_share
    if fault := strategy._attributes.find_replaced_fault(attributes):
        raise build_stop_error(strategy, fault)
    if fault := _model_fault(model, made):
        raise build_stop_error(strategy, f"{name}.aggregate must return tensors of the model by name: {fault}")
    if buffers_sent:
        made = made | average_buffers(strategy, sent)
    new = {key: made[key].to(old.dtype) if key in made else old for key, old in whole.items()}
    if not math.isfinite(norm(new.values())):
        worst = next(key for key, value in new.items() if not value.isfinite().all())
        raise build_stop_error(strategy, f"{name}.aggregate made a model that is not finite ({worst})", "diverged")
    fault = _metrics_fault(strategy) or state_fault(strategy)
    if not fault and (len(replies) or strategy.aggregates_empty_rounds):  # else nothing has set values back
        fault = strategy._attributes.find_changed()
    if fault:
        raise build_stop_error(strategy, fault)
    return new


@contextmanager
def refuse_edits(strategy: Any, tensors: Iterable[Tensor], function: str) -> Iterator[None]:
    """Raise an error if a ``function`` of a strategy changes ``tensors`` in place: ``UserError`` before the first round, else
    ``RunStopped``.
    """
    before = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]  # those have no version
    yield
    if any(tensor._version != version for tensor, version in before):
        wanted = f"{type(strategy).__name__}.{function} must not change the model or replies in place"
        fault = f"{wanted}: clients may hold the same tensors. Fix: change a copy, such as x.clone()"
        raise build_stop_error(strategy, fault) if strategy.round.server_round else UserError(fault)


def _list_lent(strategy: Any, replies: Replies) -> list[Tensor]:
    """Return the tensors that clients may hold as well: of this round, and those of earlier rounds that are still held."""
    received = {id(reply.received): reply.received for reply in replies}  # most strategies send all clients the same
    groups = [strategy.model, *received.values(), *(reply.tensors for reply in replies)]
    lent = {id(tensor): tensor for group in groups for tensor in group.values()}
    lent |= {id(tensor): tensor for held in strategy._attributes.lent if (tensor := held()) is not None}
    strategy._attributes.lent = [weakref.ref(tensor) for tensor in lent.values()]
    return list(lent.values())


def build_request_error(strategy: Any, server_round: int, fault: str) -> UserError | RunStopped:
    """Return the error for a fault in a message to clients: ``UserError`` before any round is lost by it, else
    ``RunStopped``.
    """
    return UserError(fault) if server_round < 2 else build_stop_error(strategy, fault)


def build_stop_error(strategy: Any, fault: str, status: str = "failed") -> RunStopped:
    """Return the error that ends a run for a strategy's fault, with the round."""
    return RunStopped(f"round {strategy.round.server_round}: {fault}", status)


def _model_fault(model: Tensors, made: Any) -> str:
    """Return what is wrong with ``made`` as tensors of ``model``, empty if nothing is."""
    if not isinstance(made, dict):
        return f"got {_kind(made)}"
    for name, value in made.items():
        if name not in model:
            return f"unknown '{name}'{nearest(name, model, cutoff=0)}"
        if not isinstance(value, Tensor) or value.shape != model[name].shape:
            return f"{name} is a tensor of shape {tuple(model[name].shape)}, got {_kind(value)}"
        if not value.is_floating_point():
            return f"{name} is floating-point numbers, got {format_of(value)}"
    return ""


def _metrics_fault(strategy: Any) -> str:
    """Return which of the strategy's metrics of the round cannot be logged, empty if all can."""
    name, done = type(strategy).__name__, strategy.round
    for metric in (*done.metrics, *done.client_metrics):
        if not isinstance(metric, str):
            return f"{name}: metrics of self.round have text for their names, got {metric!r}"
    for metric, value in done.metrics.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or math.isinf(value):
            got = value if isinstance(value, float) else _kind(value)
            return f"{name}: self.round.metrics['{metric}'] must be a finite number, such as float(x), or NaN, got {got}"
    for metric, pair in done.client_metrics.items():
        shapes = [np.shape(part) for part in pair] if isinstance(pair, tuple | list) else []
        if shapes and any(isinstance(part, Tensor) for part in pair):
            return f"{name}: self.round.client_metrics['{metric}'] must be (clients, values), arrays or lists, got a Tensor"
        if len(shapes) != 2 or len(shapes[0]) != 1 or shapes[0] != shapes[1]:
            got = f"shapes {', '.join(map(str, shapes))}" if shapes else _kind(pair)
            return (
                f"{name}: self.round.client_metrics['{metric}'] must be (clients, values), a value for each client, got {got}"
            )
        types = [np.asarray(part).dtype for part in pair]
        if shapes[0][0] and (types[0].kind not in "iu" or types[1].kind not in "biuf"):
            wanted = "must be (clients, values), numbers both"
            return f"{name}: self.round.client_metrics['{metric}'] {wanted}, got {types[0]}, {types[1]}"
    return ""


def _unkept(items: Iterable[tuple[Any, Any]], place: str) -> str:
    """Return place and type of the first value in a state that a checkpoint cannot hold, empty if there is none."""
    for key, value in items:
        if type(value) is Tensor and type(key) in (str, int) and storable(value):
            continue
        where = f"{place}[{key!r}]"
        if isinstance(key, bool) or not isinstance(key, str | int | np.integer):
            return f"{where} has a {type(key).__name__} for its name"
        if type(value) in (dict, list, tuple):
            if found := _unkept(value.items() if isinstance(value, dict) else enumerate(value), where):
                return found
        elif isinstance(value, Tensor):
            if not storable(value):
                return f"{where} is a tensor of {format_of(value)}"
        elif isinstance(value, np.ndarray | np.generic) and not isinstance(value, str):
            if value.dtype not in ARRAYS:
                return f"{where} is {'an array' if isinstance(value, np.ndarray) else 'a number'} of {value.dtype}"
        elif value is not None and not isinstance(value, int | float | str):
            return f"{where} is a {type(value).__name__}"
    return ""


def _kind(value: Any) -> str:
    """Return the type of a value, with its shape if it has one."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" {tuple(shape)}")
