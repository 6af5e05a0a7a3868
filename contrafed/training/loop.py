"""Train a stack: compute the gradients of all clients at once, clip them, and step, for the clients that have steps left."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from contrafed.core.errors import unknown
from contrafed.core.tensors import Tensors, find_storage, select_prefix
from contrafed.training.batches import Batch, Batches
from contrafed.training.client_stack import ClientStack, expand_like, in_order
from contrafed.training.errors import ReturnError, kind_of
from contrafed.training.local_training import LocalTraining
from contrafed.training.optimizers import Optimizer

PARTS = ("encoder", "projector", "classifier")  # of a model
Loss = Callable[[Tensors, Batch, Any], dict[str, Tensor]]
Function = Callable[[Tensors, Tensor], Any]  # one client's function of a model and images


class Step(NamedTuple):
    """A step that is about to be taken."""

    stack: ClientStack  # the clients that still train, as views
    batch: Batch
    reference_outputs: dict[str, Any]  # outputs of the reference models for the batch
    number: int  # from 0, within the phase
    batches: Batches  # all batches of the phase


class Phase(NamedTuple):
    """The arguments of ``Client.train``: what is trained for some steps, and how."""

    local_training: LocalTraining
    parts: tuple[str, ...]
    loss: Loss
    loss_inputs: Tensors
    reference_models: Mapping[str, tuple[Function, Tensors]]
    before_step: Callable[[Step], dict[str, Any]] | None
    repeat: int  # how many steps each batch is used for
    purpose: str

    def in_order(self, order: Sequence[int]) -> "Phase":
        """Return the phase for the clients in another order."""
        reference_models = {
            name: (function, in_order(model, order)) for name, (function, model) in self.reference_models.items()
        }
        return self._replace(loss_inputs=in_order(self.loss_inputs, order), reference_models=reference_models)


class Losses:
    """Each client's losses at every step of a phase, and the number of examples of each step."""

    def __init__(self, steps: list[int], counts: Tensor, rows: Sequence[dict[str, Tensor]]) -> None:
        """Lay out the losses.

        Args:
            steps: Each client's number of steps.
            counts: Examples at each step (B, S).
            rows: For each step, the losses (b,) of the b clients that took it.
        """
        self.steps, self.counts = steps, counts
        # (B, S), 0 at steps that a client did not take
        self.tables = {name: torch.zeros_like(counts) for row in rows[:1] for name in row}
        for step, row in enumerate(rows):
            for name, values in row.items():
                self.tables[name][: len(values), step] = values

    def in_order(self, order: Sequence[int]) -> "Losses":
        """Return the losses with the clients in another order."""
        found = Losses([self.steps[k] for k in order], in_order({"counts": self.counts}, order)["counts"], ())
        found.tables = in_order(self.tables, order)
        return found

    def last(self, name: str) -> Tensor:
        """Return a loss at each client's last step (B,), 0 without steps."""
        return self.mean(name, [min(steps, 1) for steps in self.steps])

    def sums(self) -> dict[str, Tensor]:
        """Return, by name, each client's sum over examples, and the number of these examples (2, B)."""
        counts = self.counts.double()
        return {name: torch.stack([(table.double() * counts).sum(1), counts.sum(1)]) for name, table in self.tables.items()}

    def mean(self, name: str, last: Sequence[int] | None = None) -> Tensor:
        """Return a loss's mean over the examples of each client's ``last`` steps (B,), or of all steps. It is 0 without
        steps.
        """
        number = torch.arange(self.counts.shape[1], device=self.counts.device)
        first = [0] * len(self.steps) if last is None else [all_ - some for all_, some in zip(self.steps, last, strict=True)]
        counts = self.counts * (number >= torch.tensor(first, device=number.device).unsqueeze(1))
        table = self.tables.get(name, torch.zeros_like(counts))  # a phase without training has none
        return (table * counts).sum(1) / counts.sum(1).clamp_min(1)


def train(client: Any, stack: ClientStack, phase: Phase) -> Losses:
    """Train ``phase.parts`` of ``stack.params`` in place. Clients are sorted by their steps, and put back afterwards."""
    if fault := parts_fault(phase.parts, {*PARTS, *map(part_of, stack.params)}):
        raise TypeError(f"the parts to train{fault}")
    if phase.local_training.keep_optimizer:
        stack.add_optimizer(phase.purpose)
    steps = stack.limit_batches([phase.local_training.steps(size) for size in stack.sizes], phase.repeat)
    for name, value in phase.loss_inputs.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (len(stack),):
            raise TypeError(f"loss_inputs['{name}'] must be clients first, ({len(stack)}, ...), not {kind_of(value)}")
    order = sorted(range(len(stack)), key=lambda k: -steps[k])
    if order == list(range(len(stack))):
        losses = _train(client, stack, phase)
        stack.count_down(losses.steps)
        return losses
    ordered = stack.reorder(order)
    try:
        losses = _train(client, ordered, phase.in_order(order))
    finally:
        stack.step = ordered.step
    stack.scatter_back(ordered, order)
    losses = losses.in_order([order.index(k) for k in range(len(stack))])
    stack.count_down(losses.steps)
    return losses


def _train(client: Any, stack: ClientStack, phase: Phase) -> Losses:
    local_training, rows = phase.local_training, list[dict[str, Tensor]]()
    batches = Batches.draw(client.workspace, local_training, stack, phase.purpose, phase.repeat)
    learning = [name for name in client.parameters_of(stack.params) if client.is_in(name, phase.parts)]
    if not batches.index.numel() or not learning:
        return Losses(batches.steps, batches.counts, rows)
    # If no gradient passes the encoder and images repeat, the encoder's outputs replace them.
    encoder = {n: v.detach() for n, v in stack.params.items() if part_of(n) == "encoder"}
    fixed_encoder = (encoder or client.model.frozen_names) and not any("/" in name or name in encoder for name in learning)
    client.model.trained_parts = parts_with_buffers(client, stack, learning)
    inputs = batches.table(client.encode, encoder) if fixed_encoder and batches.repeat and not client.reads_images else None
    client.model.encoded_by = {} if inputs is None else {n: find_storage(v) for n, v in encoder.items()}
    tables = {name: batches.table(function, model) for name, (function, model) in phase.reference_models.items()}
    kept = select_prefix(stack.state, f"optimizer/{phase.purpose}") if local_training.keep_optimizer else {}
    optimizer = Optimizer(local_training, stack.server_round, stack.sizes, {n: stack.params[n] for n in learning}, kept)
    for steps, alive in batches.segments():
        part = stack.first(alive)
        # Leaves that share the stack's storage: a step in place is a step of the stack.
        part.params = {n: v.detach().requires_grad_(n in learning) for n, v in part.params.items()}
        fixed = {n: v[:alive] for n, v in phase.loss_inputs.items()}
        for step, again in product(steps, range(phase.repeat)):
            stack.check_deadline()
            stack.step = part.step = step * phase.repeat + again
            if not again:
                batch = batches.at(step, alive, inputs)
                reference_outputs = {name: table.at(step, alive) for name, table in tables.items()}
            given = reference_outputs
            if phase.before_step is not None:
                with torch.no_grad():
                    given = _clients_first(phase.before_step, Step(part, batch, reference_outputs, part.step, batches))
            rows.append(training_step(phase, optimizer, part, batch, given | fixed, step))
            if other := rows[0].keys() ^ rows[-1].keys():
                raise ReturnError(phase.loss, f"the same names at every step of a phase, not '{min(other)}' at some")
    if local_training.keep_optimizer:
        stack.state.store({f"optimizer/{phase.purpose}/{n}": v for n, v in optimizer.export_state().items()})
    taken = [steps * phase.repeat for steps in batches.steps]
    return Losses(taken, batches.counts.repeat_interleave(phase.repeat, 1), rows)


def is_encoded(model: Any, params: Tensors, x: Tensor) -> bool:
    """Return whether a batch has encoder outputs in place of images. Raises ``TypeError`` if ``params`` has another encoder."""
    if x.dim() != 2:
        return False
    for name, place in model.encoded_by.items():
        if name not in params or find_storage(params[name]) != place:
            raise TypeError(
                f"forward: {name} is not the trained model's. This phase keeps the encoder fixed, and its batches have the "
                "encoder's outputs, not images. Fix: give another model as reference_models={NAME: (self.features, MODEL)}"
            )
    return True


def parts_with_buffers(client: Any, stack: ClientStack, learning: list[str]) -> frozenset[str]:
    """Return the parts that train in a phase and have buffers. Buffers of other parts do not change, nor do they drop.

    In a network without buffers they are the parts that train.
    """
    if not client.model.buffer_names:
        return frozenset(part_of(bare_name(name)) for name in learning) if client.model.draws else frozenset()
    models = {name.removesuffix(bare_name(name)) for name in stack.params if bare_name(name) in client.model.buffer_names}
    trained = [(name.removesuffix(bare_name(name)), bare_name(name)) for name in learning]
    return frozenset(part_of(bare) for model, bare in trained if model in models)


def bare_name(name: str) -> str:
    """Return a tensor's name in its model: ``encoder.conv.weight`` of ``own/encoder.conv.weight``."""
    return name.rpartition("/")[2]


def _clients_first(before_step: Callable[[Step], dict[str, Any]], step: Step) -> dict[str, Any]:
    """Return the result of ``before_step``. Raises ``ReturnError`` unless it is a dictionary by name with tensors (B, ...)."""
    given = before_step(step)
    if not isinstance(given, dict):
        raise ReturnError(before_step, f"a dictionary by name, not {kind_of(given)}")
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape[:1] != (len(step.stack),):
            raise ReturnError(before_step, f"'{name}' clients first, ({len(step.stack)}, ...), not {kind_of(value)}")
    return given


def training_step(
    phase: Phase, optimizer: Optimizer, stack: ClientStack, batch: Batch, inputs: Any, step: int
) -> dict[str, Tensor]:
    """Take one step of every client in the stack: forward pass and loss, backward pass, optimizer step.

    Args:
        phase: the method's loss and its training settings.
        optimizer: holds the state of SGD or Adam of each client.
        stack: the clients. Their ``params`` (B, ...) are leaves, and those that are trained require a gradient.
        batch: a batch of each client, images (B, n, C, H, W) and labels (B, n).
        inputs: what else the loss needs, tensors (B, ...) by name.
        step: number of the step within the phase, from 0.

    Returns:
        Each client's losses (B,) by name.
    """
    leaves = make_leaves(stack)
    losses = compute_losses(phase.loss, leaves, batch, inputs)
    get_minimised_loss(phase.loss, losses).sum().backward()
    with torch.no_grad():
        trained = read_gradients(stack.params, leaves)
        adjust_gradients(phase.local_training, stack, trained)
        optimizer.step(trained, step)
    for leaf in stack.params.values():
        leaf.grad = None
    return {name: value.detach().reshape(-1) for name, value in losses.items()}


def make_leaves(stack: ClientStack) -> Tensors:
    """Return the leaves (B, ...) of a step. A single client's have no client axis: it would cost autograd a view a tensor."""
    if len(stack) > 1:
        return stack.params
    return {name: value.detach()[0].requires_grad_(value.requires_grad) for name, value in stack.params.items()}


def compute_losses(loss: Loss, leaves: Tensors, batch: Batch, inputs: Any) -> dict[str, Tensor]:
    """Return each client's losses by name: (B,) under ``vmap``, scalars for one client. Raises ``ReturnError``."""
    if len(batch.y) > 1:
        return vmap(lambda *one: scalars(loss, loss(*one)))(leaves, batch, inputs)
    return scalars(loss, loss(leaves, *tree_map(lambda value: value[0], (batch, inputs))))


def read_gradients(params: Tensors, leaves: Tensors) -> Tensors:
    """Return the parameters (B, ...) that are trained, with the gradients of the leaves."""
    if leaves is not params:
        for name, leaf in leaves.items():
            params[name].grad = None if leaf.grad is None else leaf.grad.unsqueeze(0)
    return {name: value for name, value in params.items() if value.requires_grad}


def adjust_gradients(local_training: LocalTraining, stack: ClientStack, trained: Tensors) -> None:
    """Add the proximal term's gradient to those of ``trained``, then clip them for each client and model."""
    grads = {name: leaf.grad for name, leaf in trained.items() if leaf.grad is not None}
    if local_training.proximal_weight:  # the gradient of mu/2 |w - W|^2
        for name, grad in grads.items():
            if (received := stack.received.get(f"model/{name}")) is not None:
                grad.add_(trained[name] - received, alpha=local_training.proximal_weight)
    if local_training.clip_norm is not None:
        for prefix in {name.rpartition("/")[0] for name in grads}:  # each model of a client that trains several
            clip([grad for name, grad in grads.items() if name.rpartition("/")[0] == prefix], local_training.clip_norm)


def part_of(name: str) -> str:
    """Return the part of a tensor's name: ``encoder`` of ``encoder.conv.weight``, ``own`` of ``own/encoder.conv.weight``."""
    return name.partition("/")[0] if "/" in name else name.partition(".")[0]


def is_in(name: str, parts: Sequence[str], normalisation: Collection[str] = ()) -> bool:
    """Return whether a tensor is in one of ``parts``: parts of the model, or patterns of its tensors' names.

    A pattern has a ``*``, ``?`` or ``[``, as ``fnmatch`` reads them. ``norm`` means the tensors of normalisation layers. What
    begins with ``!`` is left out, even if another entry includes it: ``("encoder", "!norm")``.
    """
    inside = False
    for part in parts:
        pattern = part.removeprefix("!")
        if pattern == "norm":
            fits = bare_name(name) in normalisation
        else:
            fits = part_of(name) == pattern or (is_pattern(pattern) and fnmatchcase(name, pattern))
        if fits and part.startswith("!"):
            return False
        inside = inside or fits
    return inside


def is_pattern(part: str) -> bool:
    """Return whether an entry of ``shared_parts`` is a pattern, not a part of the model."""
    return part.startswith("!") or part == "norm" or any(sign in part for sign in "*?[")


def parts_fault(parts: Any, known: Iterable[str]) -> str:
    """Return what is wrong with ``parts``, as the end of a sentence. A tuple of ``known`` parts and patterns has no fault."""
    if not isinstance(parts, tuple):
        return f" must be a tuple of parts of the model, such as ('encoder',), got {parts!r}"
    wrong = [part for part in parts if not (isinstance(part, str) and is_pattern(part)) and part not in known]
    return f": {unknown('part of the model', wrong[0], known)}" if wrong else ""


def scalars(loss: Loss, losses: Any) -> dict[str, Tensor]:
    """Return one client's losses. Raises ``ReturnError`` unless ``loss`` returned scalar tensors by name."""
    if not isinstance(losses, dict) or "loss" not in losses:
        raise ReturnError(loss, "a dictionary with 'loss'")
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.dim():
            raise ReturnError(loss, f"a scalar tensor for each name, not {kind_of(value)} for '{name}'")
    if not losses["loss"].is_floating_point():
        raise ReturnError(loss, f"a floating-point number as 'loss', not {losses['loss'].dtype}")
    return losses


def get_minimised_loss(loss: Loss, losses: dict[str, Tensor]) -> Tensor:
    """Return the loss that is minimised, of one client or of a stack. Raises ``ReturnError`` if it has no gradient."""
    if not losses["loss"].requires_grad:
        raise ReturnError(loss, "a 'loss' with a gradient: this one depends on nothing that is trained")
    return losses["loss"]


def clip(grads: list[Tensor], limit: float) -> None:
    """Scale each client's gradient so that its norm over all tensors is at most ``limit``."""
    square = torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads]).sum(0)
    factor = (limit / (square.sqrt() + 1e-6)).clamp_max(1)
    for grad in grads:
        grad.mul_(expand_like(factor, grad))


def check_params(stack: ClientStack, params: Tensors, parts: tuple[str, ...]) -> None:
    """Raise ``TypeError`` if ``train`` would train none of its params, or would write to tensors that other clients receive."""
    learning = [name for name in params if is_in(name, parts)]
    if not learning and (others := sorted({part_of(name) for name in params if "/" in name})):
        raise TypeError(f"train(params=...) holds '{others[0]}/...', which train(parts={parts!r}) does not name")
    given = {value.data_ptr() for value in stack.received.values()}
    if shared := [name for name in learning if params[name].data_ptr() in given]:
        raise TypeError(
            f"train(params=...): {shared[0]} is what the client received, which other clients receive too; clone it"
        )
