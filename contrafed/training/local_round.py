"""Process a round for a stack of clients: open the stack, train or evaluate it, and split it into clients again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from contrafed.core.codec import KnownNorm
from contrafed.core.metrics import confusion, scores_of
from contrafed.core.tensors import Tensors, format_of, storable
from contrafed.training.batches import Batch
from contrafed.training.client_stack import (
    RESERVED,
    RESERVED_FAULT,
    ClientStack,
    ClientState,
    compute_row_norms,
    expand_or_stack,
    stack_rows,
    unstack_copies,
    unstack_views,
)
from contrafed.training.errors import ReturnError, divergence, kind_of, locate_errors
from contrafed.training.losses import cross_entropies
from contrafed.training.privacy import made_private

NO_LIMIT = np.iinfo(np.int64).max  # steps of a client that does not stop early
VALIDATION = "validation/"  # before the name of a score on a client's validation part, in a reply


@dataclass
class Update:
    """The result of one client's local update."""

    tensors: Tensors  # the declared upload
    num_examples: int
    metrics: dict[str, float]  # means over the examples seen in training
    client_state: Tensors  # committed only if the update succeeded
    diverged: str = ""  # where the loss or the weights stopped being finite: such an update is rejected
    norms: dict[str, KnownNorm] = field(default_factory=dict)  # of the upload's tensors


@dataclass
class Evaluation:
    """The scores of one client's models on a part of its data, zeros without examples."""

    num_examples: int
    metrics: dict[str, float]  # loss and accuracy of the client's model, and NAME/loss and NAME/accuracy of others
    model: Tensors  # the client's model
    # The same on its validation part, as validation/..., with validation/num-examples. Empty unless it was asked for.
    validation: dict[str, float] = field(default_factory=dict)
    added: Tensors = field(default_factory=dict)  # what eval_models added to what the client received, by name


def update(client: Any, received: Sequence[Tensors], server_round: int, deadline: float | None) -> list[Update]:
    """Run the local update of a stack of clients, as described at ``Client.update``."""
    client.losses, client.server_round, stacks = [], server_round, list[ClientStack]()
    with locate_errors(client.clients, server_round, stacks):
        rows, stack = _open_stack(client, received, server_round, client.client_states)
        stacks.append(stack)
        stack.deadline = deadline
        if any(steps is not None for steps in client.max_steps):
            stack.steps_left = np.array([NO_LIMIT if steps is None else steps for steps in client.max_steps])
        upload = client.local_update(stack)
        if not isinstance(upload, dict):
            raise ReturnError(client.local_update, "what is sent: return self.make_upload(stack)")
        _check_sent(client, upload, len(stack))
        _check_remembered(client, stack.state, rows)
        upload = _private(client, stack, upload)
        own = {n: v for n, v in stack.state.loaded_tensors.items() if n.startswith("own/")}
        left = stack.params | own | {n: v for n, v in upload.items() if not n.startswith("model/")}
        diverged = divergence(client.losses, left, len(stack))
        sent = unstack_views(upload, len(stack))
        norms = compute_row_norms(upload, sent)
        stack.state.store({f"personal/{n}": stack.params[n] for n in client.workspace.initial if not client.is_shared(n)})
        opened = unstack_copies({n: v.detach() for n, v in stack.state.loaded_tensors.items()}, len(stack))
        metrics = _means(client, len(stack))
        if more := metrics[0].keys() - {"loss", *client.loss_names}:
            wanted = f"only losses that loss_names of {type(client).__name__} declares, not '{min(more)}'"
            raise ReturnError(client.local_update, wanted, "report")
    updates = []
    for k, row in enumerate(rows):
        memory = opened[k]
        if row.keys() - memory.keys():
            # State that was not accessed is unchanged. If it came with the message it is copied, because the message may be
            # overwritten.
            found = {n: v if client.client_states[k] else v.clone() for n, v in row.items() if n not in memory} | memory
            memory = {n: found[n] for n in stack.state if n in found}  # in one order, independent of what was accessed
        updates.append(Update(sent[k], len(stack.examples[k]), metrics[k], memory, diverged[k], norms[k]))
    return updates


def _check_sent(client: Any, upload: Tensors, clients: int) -> None:
    """Raise ``ReturnError`` unless the local update returns what ``message_spec`` declares. Other replies are rejected."""
    _, declared = client.message_spec(client.model, client.config)
    if more := upload.keys() - declared.keys():
        raise ReturnError(client.local_update, f"what message_spec declares, which {min(more)} is not")
    for name, shape in declared.items():
        found = tuple(upload[name].shape) if name in upload else "nothing"
        if found != (clients, *shape):
            raise ReturnError(
                client.local_update, f"{name} of shape {(clients, *shape)}, as message_spec declares it, not {found}"
            )
        if upload[name].dtype not in (torch.float32, torch.float64):
            raise ReturnError(client.local_update, f"{name} in float32 or float64, not {upload[name].dtype}")


def _check_remembered(client: Any, memory: ClientState, rows: Sequence[Tensors]) -> None:
    """Raise ``ReturnError`` for client state that ``init_client_state`` does not have, or in another shape.

    Otherwise it might be kept or not. Of a value without the client axis, each client would keep one row.
    """
    for remembered, row in zip(client.client_states, rows, strict=True):
        new = [n for n in memory if n not in row and not n.startswith(RESERVED)]
        if new and not remembered:
            raise ReturnError(client.init_client_state, f"a value for {', '.join(new)}, which local_update keeps")
    for name, value in memory.loaded_tensors.items():
        found = tuple(value.shape) if isinstance(value, Tensor) else ()
        wanted = (len(rows), *(rows[0][name].shape if name in rows[0] else found[1:]))
        if found != wanted:
            raise ReturnError(client.local_update, f"{name} of shape {wanted}, clients first, not {kind_of(value)}", "keep")
        if not storable(value):
            raise ReturnError(client.local_update, f"what a checkpoint can hold, not {format_of(value)} for '{name}'", "keep")


class EvaluationRequest(NamedTuple):
    """Settings of an evaluation of clients."""

    split: str  # test or train part of each client's data
    final: bool  # whether this is the run's last evaluation
    after_training: bool  # after the next round's local update, whose result is discarded
    deadline: float | None  # a moment of time.monotonic()
    metrics: Sequence[str] = ()  # in addition to accuracy and loss, from contrafed.core.metrics
    validation: bool = False  # whether the validation part is evaluated too


def evaluate(
    client: Any, received: Sequence[Tensors], server_round: int, evaluating: EvaluationRequest, models: Sequence[Tensors] | None
) -> list[Evaluation]:
    """Evaluate a stack of clients, as described at ``Client.evaluate_clients``."""
    client.losses, stacks = [], list[ClientStack]()
    clients, partition = client.clients, client.workspace.federation.partition
    examples = [partition.test(k) if evaluating.split == "test" else partition.train(k) for k in clients]
    held = [partition.validation(k) for k in clients] if evaluating.validation else None
    trains = evaluating.after_training and models is None
    with locate_errors(clients, server_round, stacks, ", evaluation"), _in_round(client, server_round + trains):
        client_states = client.client_states
        if models is not None:
            client_states = [{f"personal/{n}": v for n, v in model.items()} for model in models]
            received = [{n: v for n, v in tensors.items() if not n.startswith("model/")} for tensors in received]
        # The batches and the learning rate are those of a client that is selected for the next round.
        _, stack = _open_stack(client, received, server_round + trains, client_states)
        stacks.append(stack)
        stack.final, stack.deadline = evaluating.final, evaluating.deadline
        if trains:
            client.local_update(stack)
            stack.optimizers.clear()
        before = dict(stack.received)
        evaluations = client.eval_models(stack) if models is None else {"model": stack.params}
        if not isinstance(evaluations, dict) or "model" not in evaluations:
            raise ReturnError(client.eval_models, "a dictionary with 'model'")
        _check_evaluated(client, evaluations, len(clients))
        added = _find_added(client, stack, before)
        evaluations = {name: {n: v.detach() for n, v in model.items()} for name, model in evaluations.items()}
        metrics = _score_models(client, stack, evaluations, examples, evaluating.metrics)
        checked = [] if held is None else _score_models(client, stack, evaluations, held, evaluating.metrics)
    own = unstack_views(evaluations["model"], len(clients))
    found = [
        Evaluation(len(index), scores, model, added=more)
        for index, scores, model, more in zip(examples, metrics, own, added, strict=True)
    ]
    for one, scores, index in zip(found if held is not None else [], checked, held or [], strict=True):
        one.validation = {f"{VALIDATION}{key}": value for key, value in ({"num-examples": len(index)} | scores).items()}
    return found


@contextmanager
def _in_round(client: Any, server_round: int) -> Iterator[None]:
    """Set ``client.server_round`` for an evaluation, after which it is what it was."""
    before, client.server_round = client.server_round, server_round
    try:
        yield
    finally:
        client.server_round = before


def _score_models(
    client: Any, stack: ClientStack, models: dict[str, Tensors], examples: list[Any], names: Sequence[str]
) -> list[dict[str, float]]:
    """Return each client's loss, accuracy and other scores ``names`` on its ``examples``, for each of the evaluated models."""
    metrics: list[dict[str, float]] = [{} for _ in examples]
    for name, model in models.items():
        totals = client.over_examples(stack, _make_score_sums(client, bool(names)), model, stack.received, examples)
        prefix = "" if name == "model" else f"{name}/"
        for k, found in enumerate(metrics if names and totals else []):
            more = scores_of(names, totals["confusion"][k])
            found.update({f"{prefix}{key}": value for key, value in more.items()})
        for key in ("loss", "accuracy"):
            sums = totals[key].tolist() if totals else [0.0] * len(examples)
            for found, total, index in zip(metrics, sums, examples, strict=True):
                found[f"{prefix}{key}"] = total / max(len(index), 1)
    return metrics


def _check_evaluated(client: Any, evaluations: dict[str, Any], clients: int) -> None:
    """Raise ``ReturnError`` unless every evaluated model is complete, because other tensors would replace missing ones."""
    if more := evaluations.keys() - {"model", *client.model_names}:
        name = type(client).__name__
        raise ReturnError(client.eval_models, f"models that model_names of {name} declares, not '{min(map(str, more))}'")
    for model, tensors in evaluations.items():
        if not isinstance(tensors, dict):
            raise ReturnError(client.eval_models, f"models, tensors by name, not {kind_of(tensors)} as '{model}'")
        for name, value in client.workspace.initial.items():
            found = kind_of(tensors[name]) if name in tensors else "nothing"
            if found != (wanted := f"shape {(clients, *value.shape)}"):
                raise ReturnError(client.eval_models, f"whole models, {name} of {wanted} in '{model}', not {found}")
        if more := tensors.keys() - client.workspace.initial.keys():
            raise ReturnError(client.eval_models, f"models as they are, without {min(more)} in '{model}'")


def _find_added(client: Any, stack: ClientStack, before: Tensors) -> list[Tensors]:
    """Return what ``eval_models`` added to each client's received tensors ``before``. Raises ``ReturnError``."""
    added = {n: v for n, v in stack.received.items() if v is not before.get(n)}
    for name, value in added.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (len(stack),):
            wanted = f"'{name}' in stack.received clients first, ({len(stack)}, ...), not {kind_of(value)}"
            raise ReturnError(client.eval_models, wanted)
    return unstack_views(added, len(stack))


def _private(client: Any, stack: ClientStack, sent: Tensors) -> Tensors:
    """Return a stack's upload, with noise if ``privacy`` makes clients add it."""
    run = client.workspace.run
    if run.privacy is None:
        return sent
    return made_private(sent, stack.received, run.privacy.config, run.seed, stack.server_round, stack.clients)


def _make_mover(client: Any) -> Callable[[Tensor], Tensor]:
    device, dtype = client.workspace.device, client.workspace.dtype
    return lambda tensor: tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def _load_client_state(client: Any, number: int, memory: Tensors, received: Tensors) -> Tensors:
    """Return a client's state, or its initial state. Raises ``ReturnError`` unless it consists of tensors by name.

    While ``init_client_state`` runs, ``client.clients`` is this one alone, by whose ``number`` it may draw.
    """
    if memory:
        return memory
    own = {f"personal/{n}": v for n, v in client.workspace.initial.items() if not client.is_shared(n)}
    place = _make_mover(client)
    every, client.clients = client.clients, [number]
    try:
        begun = client.init_client_state({n: place(v) for n, v in received.items()})
    finally:
        client.clients = every
    if not isinstance(begun, dict):
        raise ReturnError(client.init_client_state, f"a dictionary of tensors, not {kind_of(begun)}")
    for name, value in begun.items():
        if name.startswith(RESERVED):
            raise ReturnError(client.init_client_state, f"no '{name}'{RESERVED_FAULT}")
        if not isinstance(value, Tensor):
            raise ReturnError(client.init_client_state, f"a tensor for each name, not {kind_of(value)} for '{name}'")
        if not storable(value):
            raise ReturnError(client.init_client_state, f"what a checkpoint can hold, not {format_of(value)} for '{name}'")
    return own | begun


def _open_stack(
    client: Any, received: Sequence[Tensors], server_round: int, client_states: Sequence[Tensors]
) -> tuple[list[Tensors], ClientStack]:
    """Return each client's state, a new one for its first round, and the stack of what they received and their states.

    What stays of a part that is shared, such as local buffers, is also in what they received: the model there is whole.
    """
    if local := client.local_names:
        begin, known = client.workspace.initial, zip(received, client_states, strict=True)
        received = [r | {f"model/{n}": m.get(f"personal/{n}", begin[n]) for n in local} for r, m in known]
    rows = list(client_states)
    if client.has_client_state(client.model, client.config):
        each = zip(client.clients, client_states, received, strict=True)
        rows = [_load_client_state(client, *one) for one in each]
    place = _make_mover(client)
    constants = {n: expand_or_stack([tensors[n] for tensors in received], place) for n in received[0]}
    # If only some clients have optimiser state of a phase, it starts at zero for the others, as in a new optimiser.
    if any(name.startswith("optimizer/") for name in set[str]().union(*rows)):
        kept = {n: v for row in rows for n, v in row.items() if n.startswith("optimizer/")}
        rows = [{n: torch.zeros_like(v) for n, v in kept.items()} | row for row in rows]
    memory = ClientState(rows[0], lambda name: stack_rows([row[name] for row in rows], place))
    params = {}
    for name in client.workspace.initial:
        source = constants.get(f"model/{name}")
        params[name] = (memory[f"personal/{name}"] if source is None else source).clone()
    examples = [client.workspace.federation.partition.train(k) for k in client.clients]
    return rows, ClientStack(list(client.clients), examples, server_round, params, constants, memory)


def _make_score_sums(client: Any, confused: bool) -> Callable[..., Tensors]:
    """Return a function that sums one client's cross-entropy and correct answers over a batch, and confusions if ``confused``.

    The function raises ``ReturnError`` unless there is a score for each class.
    """

    def sums(params: Tensors, batch: Batch, received: Tensors) -> Tensors:
        with client.model.holding(params) as model:
            features = model(batch.x)
            scores = client.scores(features, received)
        if not isinstance(scores, Tensor) or scores.shape != features.logits.shape:
            wanted = tuple(features.logits.shape)
            raise ReturnError(client.scores, f"scores of shape {wanted}, by example and class, not {kind_of(scores)}")
        right = (scores.argmax(1) == batch.y).to(scores)
        found = {"loss": (cross_entropies(scores, batch.y) * batch.mask).sum(), "accuracy": (right * batch.mask).sum()}
        if confused:
            found["confusion"] = confusion(scores.argmax(1), batch.y, batch.mask, scores.shape[1])
        return found

    return sums


def _means(client: Any, clients: int) -> list[dict[str, float]]:
    """Return each client's mean losses over the examples that had them, over all phases.

    A client that stopped before a phase has no loss of it.
    """
    totals: Tensors = {}
    for losses in client.losses:
        for name, found in losses.sums().items():
            totals[name] = totals[name] + found if name in totals else found
    means = {name: torch.stack((total[0] / total[1].clamp_min(1), total[1])).tolist() for name, total in totals.items()}
    return [{name: mean[k] for name, (mean, count) in means.items() if count[k]} for k in range(clients)]
