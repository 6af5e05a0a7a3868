"""The node half of every method: local training, written once over a leading node axis.

A method subclasses ``Client`` and says *what* is optimised: which parts of the model travel, the loss, what is remembered
between rounds, what is sent back. It never loops over nodes, opens a loader, moves a tensor to a device or names an engine.
On a device the stack has one node (B = 1); in simulation an engine may train many virtual nodes as one stack.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from clients.losses import cross_entropy
from clients.node.files import read_personal, write_personal
from clients.training.augment import augmented, draw_augmentation
from clients.training.optimizers import OwnClocks, StackedOptimizer
from clients.training.stack import Batch, Coming, LocalWork, Plan, Stack, draw_batches, draw_dropout, one_step
from clients.training.workspace import Workspace, find_client, make_config_of_node
from core import codec
from core.tensors import Tensors, group
from models.base import Features, SplitModel

PARTS = ("encoder", "projector", "classifier")
# Examples that frozen models represent at a time: on a CPU the outputs of many more leave the caches. On an accelerator as many
# of each node, which makes one call of PMFL's five steps of 16.
AHEAD = 80
Shapes = dict[str, tuple[int, ...]]
# By the losses' names, each node's sums of them over the examples seen in training, and last how many these are (L + 1, B).
Totals = dict[tuple[str, ...], Tensor]


class DeadlineError(Exception):
    """The round's time limit passed while this node was training."""


class LocalError(Exception):
    """Local training failed; the message names node, round and step."""


class NoRoomError(LocalError):
    """Local training did not fit the accelerator's memory."""


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of a node half that has none of its own beside the local work."""

    local: LocalWork


@dataclass
class Update:
    """What one node's local work produced."""

    tensors: Tensors  # the declared upload
    num_examples: int
    metrics: dict[str, float]  # means over the examples seen in training
    memory: Tensors  # committed only if the update succeeded


@dataclass(frozen=True)
class Phase:
    """A stretch of local training in which some parts of the model learn and the others are frozen."""

    work: LocalWork
    parts: tuple[str, ...] = PARTS
    purpose: str = "batches"
    encode_once: bool = False  # with the encoder frozen: ``batch.x`` is its output, computed once for all epochs


class Client(NumPyClient):
    """One node, or a stack of B nodes, of a federation.

    To a plain Flower user this is a ``NumPyClient`` for one node: ``get_parameters``, ``fit`` and ``evaluate`` speak lists
    of arrays in the order of ``names("down")`` and ``names("up")``. The engines call ``update`` with B nodes.

    Subclasses set ``Config`` (in their module), ``shared`` and ``upload``, and override ``loss`` and, where needed,
    ``constants``, ``fresh_memory``, ``before_step``, ``phases``, ``start`` and ``finish``.
    """

    shared: ClassVar[tuple[str, ...]] = PARTS  # the parts of the model that travel; the others stay on the node
    upload: ClassVar[Literal["model", "delta"]] = "model"  # send the trained tensors, or their change
    mixed_on: ClassVar[tuple[str, ...]] = ("cuda",)  # where local.mixed_precision has an effect

    def __init__(self, workspace: Workspace, nodes: Sequence[int], memories: Sequence[Tensors] | None = None) -> None:
        """Stand for ``nodes`` (partition ids); ``memories`` is what each remembers, empty for a node's first time."""
        self.workspace = workspace
        self.model: SplitModel = workspace.model
        self.config: Any = workspace.config
        self.parts = self.shared_parts(workspace.config)
        self.nodes = list(nodes)
        self.memories: list[Tensors] = list(memories) if memories is not None else [{} for _ in nodes]
        self.server_round = 0

    # ---------------------------------------------------------------------------------------------- what a method declares

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Return the parts of the model that travel, where that is for the configuration to say."""
        return cls.shared

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the names and shapes of every tensor a node receives and sends. Nothing else ever crosses."""
        parts = cls.shared_parts(config)
        travels = {n: tuple(p.shape) for n, p in model.named_parameters() if n.split(".", 1)[0] in parts}
        return (
            {f"model/{name}": shape for name, shape in travels.items()},
            {f"{cls.upload}/{name}": shape for name, shape in travels.items()},
        )

    @classmethod
    def is_personal(cls, config: Any) -> bool:
        """Whether a node is judged by a model of its own."""
        return bool(set(PARTS) - set(cls.shared_parts(config)))

    @classmethod
    def remembers(cls, model: SplitModel, config: Any) -> bool:
        """Whether a node keeps anything between rounds."""
        parts = cls.shared_parts(config)
        personal = any(name.split(".", 1)[0] not in parts for name, _ in model.named_parameters())
        return personal or config.local.keep_optimizer or cls.fresh_memory is not Client.fresh_memory

    def fresh_memory(self, received: Tensors) -> Tensors:
        """Return what a node remembers before its first round, given what it ``received``; personal parts are added."""
        return {}

    def phases(self, stack: Stack) -> Iterator[Phase]:
        """Yield the phases of a round's local work; by default one, in which everything learns."""
        yield Phase(self.config.local)

    def start(self, stack: Stack) -> None:
        """Prepare the stack before its first step; ``stack.params`` hold the received shared and own personal parts."""

    def frozen_models(self, stack: Stack) -> Mapping[str, Tensors]:
        """Return models (B, ...) that stay as they are for a phase and whose representations the loss needs, by name.

        The representations (B, b, D) join the step's constants. Where a phase sees its examples more than once, each is
        represented once and looked up from then on.
        """
        return {}

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """Return what else the loss takes as constant in this step, each with a leading B; runs once a step, without gradients.

        ``stack.represented`` has the representations under ``frozen_models``.
        """
        return {}

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Return one node's named losses for a batch (no B axis); ``"loss"`` is the one that is minimised."""
        return {"loss": self.task_loss(self.forward(params, batch), batch)}

    def before_step(self, stack: Stack, losses: dict[str, Tensor]) -> None:
        """Observe ``stack.params`` just before the optimiser changes them; ``losses`` are this step's, each (B,)."""

    def finish(self, stack: Stack) -> Tensors:
        """Return what is sent back, each with a leading B, and write ``stack.memory``."""
        trained = {n: v.detach() for n, v in stack.params.items() if self._travels(n)}
        if self.upload == "model":
            return {f"model/{n}": v for n, v in trained.items()}
        changes = torch._foreach_sub(list(trained.values()), [stack.received[f"model/{n}"] for n in trained])
        return {f"delta/{n}": change for n, change in zip(trained, changes, strict=True)}

    # ------------------------------------------------------------------------------------------------- tools for a method

    def task_loss(self, features: Features, batch: Batch) -> Tensor:
        """Mean cross-entropy of one node's batch."""
        return cross_entropy(features.logits, batch.y, batch.mask)

    def forward(self, params: Tensors, batch: Batch, with_levels: bool = False) -> Features:
        """Run one node's model on its batch, with the step's dropout; for use inside ``loss``."""
        dropout = batch.dropout if self.model.dropout else None
        return self._features(params, batch.x, dropout, with_levels, encoded=batch.x.dim() == 2)

    def _features(
        self, params: Tensors, x: Tensor, dropout: Tensor | None = None, with_levels: bool = False, encoded: bool = False
    ) -> Features:
        """Run a model as training does: under ``mixed_precision`` in bfloat16, with features in full precision."""
        with self._precision() as mixed, self.model.holding(params) as model:
            features: Features = model(x, dropout, with_levels, encoded)
        return tree_map(lambda t: t.to(self.workspace.dtype), features) if mixed else features  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _precision(self) -> Iterator[bool]:
        """Compute as ``mixed_precision`` says, where it has an effect; yields whether it has."""
        device = self.workspace.device.type
        if not (self.config.local.mixed_precision and device in self.mixed_on):
            yield False  # entering autocast costs a small model a tenth of its forward pass, even to switch it off
            return
        # Casts are not cached: the cache outlives neither vmap's wrappers nor a model's change of parameters.
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            yield True

    def embed(self, params: Tensors, x: Tensor) -> Tensor:
        """Representations z (B, b, D) of images x (B, b, C, H, W) under models ``params`` (B, ...), in evaluation mode."""
        if len(x) == 1 or all(v.stride(0) == 0 for v in params.values()):  # one model, or one that all nodes received
            return self._represent({n: v[0] for n, v in params.items()}, x.flatten(0, 1)).unflatten(0, x.shape[:2])
        z: Tensor = vmap(self._represent)(params, x)
        return z

    def embed_several(self, params: Tensors, x: Tensor) -> Tensor:
        """As ``embed``, under each of a node's M models ``params`` (B, M, ...): z (B, M, b, D)."""
        several: Callable[[Tensors, Tensor], Tensor] = vmap(self._represent, in_dims=(0, None))
        if len(x) == 1:
            return several({n: v[0] for n, v in params.items()}, x[0]).unsqueeze(0)
        z: Tensor = vmap(several)(params, x)
        return z

    def embed_ahead(self, stack: Stack, params: Tensors, first: int, count: int, several: bool = False) -> list[Tensor]:
        """Representations (B, b, D) of the batches of ``count`` steps from ``first`` on, or of those that are left.

        Under models ``params`` (B, ...), or, if ``several``, (B, M, ...) for representations (B, M, b, D), in evaluation mode;
        to be used in ``constants`` and ``before_step``. A model that several steps need is best asked for all of them: its
        weights are read once, and an accelerator has fewer and larger kernels.
        """
        assert stack.coming is not None
        embed = self.embed_several if several else self.embed
        last, found = min(first + count, stack.steps), []
        while first < last:
            x, widths = stack.coming.images(range(first, last), len(stack), self._room(len(stack)))
            found += embed(params, x).split(widths, dim=-2)
            first += len(widths)
        return found

    def _room(self, nodes: int) -> int:
        """Return how many examples of each of so many nodes to represent at a time."""
        return max(1, AHEAD // nodes) if self.workspace.device.type == "cpu" else AHEAD

    @staticmethod
    def global_model(stack: Stack) -> Tensors:
        """The received shared tensors, by model name."""
        return group(stack.received, "model")

    @staticmethod
    def _over_nodes(function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` for every node: under ``vmap``, or directly for a lone node."""
        if len(next(iter(args[0].values()))) == 1:
            out = function(*tree_map(lambda t: t.squeeze(0), args))
            return tree_map(lambda t: t.unsqueeze(0), out)
        return vmap(function)(*args)

    def _one_pass(self, parts: list[np.ndarray]) -> Plan:
        """Lay out one pass over each node's examples in their order, as many at a time as an evaluation takes."""
        chunk = max(1, self.workspace.evaluation_batch // len(parts))
        pieces = [[part[i : i + chunk] for i in range(0, len(part), chunk)] for part in parts]
        return Plan.draw(pieces, self.workspace.device, self.workspace.dtype)

    def over_examples(self, stack: Stack, function: Callable[..., Any], params: Tensors, constants: Tensors) -> Tensors:
        """Sum ``function(params, batch, constants)`` (one node's sums, by name) over each node's whole training part.

        In evaluation mode, in the examples' stored order; returns each sum with a leading B.
        """
        parts = [self.workspace.federation.partition.train(node) for node in stack.nodes]
        plan = self._one_pass(parts)
        totals: Tensors = {}
        with torch.no_grad():
            for step in range(plan.index.shape[1]):
                block, (width,) = self._block(plan, step, step + 1, len(parts))
                batch = one_step(block, 0, width, len(parts))
                for name, value in self._over_nodes(function, params, batch, constants).items():
                    totals[name] = totals[name] + value if name in totals else value
        return totals

    def prototypes(self, stack: Stack) -> tuple[Tensor, Tensor]:
        """Return each node's class means of z (B, C, D), rows of absent classes zero, and class counts (B, C).

        Under ``stack.params``, in evaluation mode, over the whole training part: what papers also call class centres or
        label-centroid representations.
        """
        classes = self.model.num_classes

        def sums(params: Tensors, batch: Batch, constants: Tensors) -> Tensors:
            with self.model.holding(params) as model:
                z = model(batch.x).z
            member = torch.nn.functional.one_hot(batch.y, classes).to(z) * batch.mask.unsqueeze(1)
            return {"sum": member.T @ z, "count": member.sum(0)}

        frozen = {name: value.detach() for name, value in stack.params.items()}
        totals = self.over_examples(stack, sums, frozen, {})
        return totals["sum"] / totals["count"].clamp_min(1).unsqueeze(-1), totals["count"]

    # ------------------------------------------------------------------------------------------------------ local training

    def update(self, received: Sequence[Tensors], server_round: int, deadline: float | None = None) -> list[Update]:
        """Train the stack's nodes and return their updates, in the order of ``self.nodes``.

        ``received[k]`` are the declared tensors for node k; none is written to. ``deadline`` is a ``time.monotonic()``
        moment that is checked between steps. Raises ``DeadlineError``, or ``LocalError``, of which ``NoRoomError`` is one.
        """
        examples = [self.workspace.federation.partition.train(node) for node in self.nodes]
        order = sorted(range(len(self.nodes)), key=lambda k: -self.work_of(len(examples[k])))
        examples, nodes = [examples[k] for k in order], [self.nodes[k] for k in order]
        stack: Stack | None = None
        totals: Totals = {}
        try:
            stack = self._open([received[k] for k in order], [self.memories[k] for k in order], nodes, examples, server_round)
            self.start(stack)
            for phase in self.phases(stack):
                self._train(stack, phase, examples, totals, deadline)
            updates = self._apart(stack, self.finish(stack), totals, examples)
        except DeadlineError:
            raise
        except Exception as error:
            step = 0 if stack is None else stack.step
            kind = NoRoomError if _out_of_memory(error) else LocalError
            where = f"node {', '.join(map(str, nodes))}, round {server_round}, step {step}"
            raise kind(f"{where}: {type(error).__name__}: {error}") from error
        by_place = dict(zip(order, updates, strict=True))
        return [by_place[k] for k in range(len(order))]

    def _apart(self, stack: Stack, tensors: Tensors, totals: Totals, examples: Sequence[np.ndarray]) -> list[Update]:
        """Take what the stack's nodes send and remember apart, in the stack's order."""
        stack.memory |= self._personal_parts(stack)
        sums: dict[str, Any] = {}  # of each loss, and of the examples behind it (2, B)
        for names, total in totals.items():  # phases may differ in their losses, or have some in common
            *rows, seen = np.array(total.tolist())
            for name, row in zip(names, rows, strict=True):
                sums[name] = sums.get(name, 0) + np.stack([row, seen])
        means = {name: (total / np.maximum(seen, 1)).tolist() for name, (total, seen) in sums.items()}
        memories = _taken_apart({name: value.detach() for name, value in stack.memory.items()})
        sent = {name: value.detach().unbind() for name, value in tensors.items()}
        return [
            Update(
                {name: rows[row] for name, rows in sent.items()},
                len(examples[row]),
                {name: values[row] for name, values in means.items()},
                {name: rows[row] for name, rows in memories.items()},
            )
            for row in range(len(stack))
        ]

    def work_of(self, examples: int) -> int:
        """Return how many steps a node with so many examples takes in a round: what scheduling goes by."""
        return int(self.config.local.steps(examples))

    def _travels(self, name: str) -> bool:
        return name.split(".", 1)[0] in self.parts

    def _personal(self) -> list[str]:
        return [n for n in self.workspace.initial if not self._travels(n)]

    def _personal_parts(self, stack: Stack) -> Tensors:
        return {f"personal/{name}": stack.params[name] for name in self._personal()}

    def train_alone(self, received: Tensors, memory: Tensors, server_round: int, phase: Phase) -> Tensors:
        """Return this one node's memory after one phase on its own; the one given stays as it is."""
        examples = [self.workspace.federation.partition.train(node) for node in self.nodes]
        stack = self._open([received], [memory], self.nodes, examples, server_round)
        self._train(stack, phase, examples, {}, None)
        stack.memory |= self._personal_parts(stack)
        return {name: value[0].detach() for name, value in stack.memory.items()}

    def _open(
        self,
        received: list[Tensors],
        memories: list[Tensors],
        nodes: list[int],
        examples: list[np.ndarray],
        server_round: int,
    ) -> Stack:
        """Stack what ``nodes`` received and remember."""
        device, dtype = self.workspace.device, self.workspace.dtype

        def place(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

        def stacked(rows: list[Tensor]) -> Tensor:
            if len({row.device for row in rows}) == 1:
                return place(torch.stack(rows))  # one copy to an accelerator, not B
            return torch.stack([place(row) for row in rows])

        def join(rows: list[Tensor]) -> Tensor:
            if all(row is rows[0] for row in rows):  # a broadcast: one tensor seen B times, not B copies
                return place(rows[0]).expand(len(rows), *rows[0].shape)
            return stacked(rows)

        constants = {name: join([tensors[name] for tensors in received]) for name in received[0]}
        remembered = []
        for tensors, memory in zip(received, memories, strict=True):
            if not memory:
                memory = {f"personal/{n}": self.workspace.initial[n] for n in self._personal()}
                memory |= self.fresh_memory({n: place(v) for n, v in tensors.items()})
            remembered.append(memory)
        # Optimiser state of phases that some of the nodes have not been through starts at zero, as in a new optimiser.
        kept = {n: v for memory in remembered for n, v in memory.items() if n.startswith("optimizer/")}
        remembered = [{n: torch.zeros_like(v) for n, v in kept.items()} | memory for memory in remembered]
        # Stacking copies, so writing to the stack's memory in place leaves the committed one as it was.
        memory = {name: stacked([m[name] for m in remembered]) for name in remembered[0]}
        params = {}
        for name in self.workspace.initial:
            source = constants.get(f"model/{name}")
            params[name] = (memory[f"personal/{name}"] if source is None else source).clone()
        sizes = torch.tensor([len(part) for part in examples], device=device)
        return Stack(nodes, server_round, params, constants, memory, sizes)

    def _train(
        self,
        stack: Stack,
        phase: Phase,
        examples: list[np.ndarray],
        totals: Totals,
        deadline: float | None,
    ) -> None:
        """Run one phase; nodes leave the stack when their steps are done."""
        stack.phase = phase.purpose
        workspace, work, rounds = self.workspace, phase.work, stack.server_round
        batches = [
            draw_batches(work, indices, workspace.seed, phase.purpose, rounds, node)
            for indices, node in zip(examples, stack.nodes, strict=True)
        ]
        plan = Plan.draw(batches, workspace.device, workspace.dtype)
        counts, width = [sum(map(len, rows)) for rows in batches], self.model.embedding_size

        def each(padding: float, draw: Callable[..., Tensor], *what: Any) -> Callable[[int, int, int], Tensor]:
            drawn = [
                draw(*what, count, workspace.seed, phase.purpose, rounds, node)
                for count, node in zip(counts, stack.nodes, strict=True)
            ]
            return plan.picker(drawn, padding)

        dropout = each(1, draw_dropout, self.model.dropout, width) if self.model.dropout else None
        changes = each(0, draw_augmentation, work.augment, min(workspace.x.shape[1:3])) if work.augment else None
        frozen = self.frozen_models(stack)
        encoded, tables = None, {}
        again = phase.encode_once or (bool(frozen) and sum(counts) > sum(map(len, examples)))
        if again and any(counts) and not work.augment:  # no example looks the same twice under augmentation
            once = _Once(self, examples, batches)
            encoded = once.gather(self._encoder(stack), self._encode) if phase.encode_once else None
            tables = {name: once.gather(params, self._represent) for name, params in frozen.items()}
        trained = [n for n in stack.params if n.split(".", 1)[0] in phase.parts]
        optimizer: StackedOptimizer | OwnClocks | None = None
        part, stack.steps = stack, max(plan.steps, default=0)
        ahead: dict[str, list[Tensor]] = {name: [] for name in frozen if name not in tables}
        seen, ones = plan.mask.sum(2), plan.mask.new_ones(len(stack))  # (B, S) examples in each step

        def together() -> int:
            """Return of how many steps the batches are gathered, and represented, at once."""
            return max(1, self._room(alive) // plan.index.shape[2])

        # Must not refer to the stack: the stack refers to it, and the cycle would keep both until a garbage collection.
        def make(step: int) -> tuple[Batch, list[int]]:
            last = min(step + together(), plan.index.shape[1])
            return self._block(plan, step, last, alive, dropout, changes, encoded)

        coming = stack.coming = Coming(make)
        for step in range(stack.steps):
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError
            alive = sum(steps > step for steps in plan.steps)
            if optimizer is None or alive < len(part):
                part = self._shrink(stack, alive, trained)
                if optimizer is None:
                    optimizer = (OwnClocks if work.own_clock else StackedOptimizer)(work, phase.purpose, stack)
                optimizer.cut({n: part.params[n] for n in trained})
                # A lone node's leaves have no node axis: taking it off anew costs autograd a view a tensor, at every step.
                leaves = part.params
                if alive == 1:
                    leaves = {n: v.detach()[0].requires_grad_(n in trained) for n, v in leaves.items()}
            stack.step = part.step = step
            batch = coming.current(step, alive)
            with torch.no_grad():
                part.represented = {n: gather(step, step + 1, alive)[:, 0] for n, gather in tables.items()}
                for name, found in ahead.items():
                    if not found:
                        models = {n: v[:alive] for n, v in frozen[name].items()}
                        found += self.embed_ahead(part, models, step, together())
                    part.represented[name] = found.pop(0)[:alive]
                constants = part.represented | self.constants(part, batch)
            losses = self._gradients(part, leaves, batch, constants)
            with torch.no_grad():
                if work.proximal_weight:
                    self._pull(part, trained, work.proximal_weight)
                if work.clip_norm is not None:
                    _clip([part.params[n] for n in trained], work.clip_norm)
                self.before_step(part, losses)
                optimizer.step(step)
                for name in trained:
                    part.params[name].grad = None
                total = totals.get(tuple(losses))
                if total is None:
                    total = totals[tuple(losses)] = ones.new_zeros(len(losses) + 1, len(stack))
                total[:, :alive].addcmul_(torch.stack([*losses.values(), ones[:alive]]), seen[:alive, step])
        stack.coming = None
        if optimizer is not None and work.keep_optimizer:
            stack.memory |= optimizer.state()

    def _gradients(self, stack: Stack, leaves: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Give what is trained its gradient; returns each node's losses (B,).

        ``leaves`` are ``stack.params``, or, of a lone node, leaves without the node axis over the same storage.
        """
        if len(stack) > 1:
            losses = vmap(self.loss)(leaves, batch, constants)
            losses["loss"].sum().backward()
            return {name: value.detach() for name, value in losses.items()}
        losses = self.loss(leaves, Batch(*(value[0] for value in batch)), {n: v[0] for n, v in constants.items()})
        losses["loss"].backward()
        for name, leaf in leaves.items():
            stack.params[name].grad = None if leaf.grad is None else leaf.grad.unsqueeze(0)
            leaf.grad = None
        return {name: value.detach().unsqueeze(0) for name, value in losses.items()}

    @staticmethod
    def _encoder(stack: Stack) -> Tensors:
        return {n: v.detach() for n, v in stack.params.items() if n.startswith("encoder.")}

    def _encode(self, params: Tensors, x: Tensor) -> Tensor:
        """Return one node's encoder outputs (b, E)."""
        with self._precision(), self.model.holding(params) as model:
            out: Tensor = model.encoder(x)
        return out.to(self.workspace.dtype)

    def _represent(self, params: Tensors, x: Tensor) -> Tensor:
        """Return one node's representations z (b, D), in evaluation mode."""
        with self._precision(), self.model.holding(params) as model:
            z = model.represent(x)
        return z.to(self.workspace.dtype)

    @staticmethod
    def _shrink(stack: Stack, alive: int, trained: list[str]) -> Stack:
        """Keep the first ``alive`` nodes: leaves over the same storage."""
        part = stack.first(alive) if alive < len(stack) else Stack(**vars(stack))
        # A detached view shares storage, so in-place steps are seen in the whole stack.
        part.params = {n: v.detach().requires_grad_(n in trained) for n, v in part.params.items()}
        return part

    @staticmethod
    def _pull(stack: Stack, trained: list[str], weight: float) -> None:
        """Add the gradient of ``weight`` |w - W|^2, W the received model, over what is trained and received."""
        for name in trained:
            received, value = stack.received.get(f"model/{name}"), stack.params[name]
            if received is not None and value.grad is not None:
                value.grad.add_(value - received, alpha=2 * weight)

    def _block(
        self,
        plan: Plan,
        first: int,
        last: int,
        alive: int,
        dropout: Callable[[int, int, int], Tensor] | None = None,
        changes: Callable[[int, int, int], Tensor] | None = None,
        encoded: Callable[[int, int, int], Tensor] | None = None,
    ) -> tuple[Batch, list[int]]:
        """Gather the minibatches (alive, S, b, ...) of some steps, padded and masked, and return how wide each is.

        ``dropout(first, last, alive)`` gives the steps' factors, ``changes`` what augments their images, ``encoded`` what
        stands in for them.
        """
        width = plan.width(first, last)
        index, mask = plan.index[:alive, first:last, :width], plan.mask[:alive, first:last, :width]
        factors = mask.new_ones(mask.shape[:2]) if dropout is None else dropout(first, last, alive)
        if encoded is not None:
            x = encoded(first, last, alive)
        elif changes is None:
            x = self.workspace.images(index)
        else:
            change = changes(first, last, alive).flatten(0, 2)
            x = self.workspace.images(index, lambda raw: augmented(raw, change))
        return Batch(x, self.workspace.labels(index), mask, factors), plan.widths(first, last)

    # ---------------------------------------------------------------------------------------------------------- evaluation

    def judged_model(self, received: Tensors, memory: Tensors) -> Tensors:
        """Return the model a node is judged by: by default what it received and its own personal parts (post_agg)."""
        model = {}
        for name, initial in self.workspace.initial.items():
            own = memory.get(f"personal/{name}", initial)
            model[name] = received.get(f"model/{name}", own).to(self.workspace.device, self.workspace.dtype)
        return model

    def refresh(self, received: Tensors, memory: Tensors, server_round: int) -> Tensors:
        """Return the memory by which a node is judged at the end of a run: by default what it remembers."""
        return memory

    def _score(self, node: int, model: Tensors, received: Tensors, split: str) -> tuple[float, float, int]:
        part = self.workspace.federation.partition
        index = part.test(node) if split == "test" else part.train(node)
        return score(self.workspace, partial(self._judged, model, received), index)

    def judge(self, features: Features, received: Tensors) -> Tensor:
        """Return the scores (b, C) by which a node predicts; by default the logits."""
        return features.logits

    def _judged(self, model: Tensors, received: Tensors, x: Tensor) -> Features:
        with self.model.holding(model) as judged:
            features: Features = judged(x)
        return features._replace(logits=self.judge(features, received))

    # ------------------------------------------------------------------------------------------------ Flower's NumPyClient

    def names(self, direction: Literal["down", "up"]) -> list[str]:
        """The order of the arrays that ``fit`` takes (down) and returns (up)."""
        down, up = self.messages(self.model, self.config)
        return list(down if direction == "down" else up)

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:  # type: ignore[override]
        """Return the initial shared tensors, in the order of ``names("down")``; tables that start empty are zeros."""
        down, _ = self.messages(self.model, self.config)
        initial = {f"model/{n}": v for n, v in self.workspace.initial.items()}
        return codec.to_list(down, {n: initial.get(n, torch.zeros(shape)) for n, shape in down.items()})

    def fit(
        self, parameters: list[np.ndarray], config: Mapping[str, Any], deadline: float | None = None
    ) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Train this one node and return its arrays, its number of training examples and its metrics.

        ``config["server-round"]`` is the 1-based round; without it the client counts its own calls.
        """
        self.server_round = int(config.get("server-round", self.server_round + 1))
        received = codec.from_list(self.names("down"), parameters)
        (update,) = self.update([received], self.server_round, deadline)
        self.memories = [update.memory]
        return codec.to_list(self.names("up"), update.tensors), update.num_examples, dict(update.metrics)

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Score this one node's model on its own ``config["split"]`` (test by default): loss, examples, accuracy.

        ``config["final"]`` marks the run's last evaluation. ``config["save"]`` is a folder to which the judged model is
        written, on the node's own disk; ``config["load"]`` one from which it is read instead. Changes no state.
        """
        received = codec.from_list(self.names("down"), parameters)
        (node,), (memory,) = self.nodes, self.memories
        if config.get("load"):
            model, received = read_personal(str(config["load"]), node)
            model = {n: v.to(self.workspace.device, self.workspace.dtype) for n, v in model.items()}
        else:
            if config.get("final"):
                memory = self.refresh(received, memory, int(config["server-round"]))
            model = self.judged_model(received, memory)
        if config.get("save"):
            write_personal(str(config["save"]), node, model, received)
        loss, accuracy, count = self._score(node, model, received, str(config.get("split", "test")))
        return loss, count, {"accuracy": accuracy}


class _Once:
    """What is computed once for every example that a phase sees, and looked up at each step."""

    def __init__(self, client: Client, examples: list[np.ndarray], batches: list[list[np.ndarray]]) -> None:
        self.client = client
        self.known = [np.unique(part) for part in examples]
        places = [[np.searchsorted(own, b) for b in row] for own, row in zip(self.known, batches, strict=True)]
        self.where = Plan.draw(places, client.workspace.device, client.workspace.dtype)

    def gather(self, params: Tensors, function: Callable[[Tensors, Tensor], Tensor]) -> Callable[[int, int, int], Tensor]:
        """Call ``function`` (one node's) under ``params`` (B, ...); returns what picks some steps' rows (alive, S, b, E)."""
        client, where, rows = self.client, self.where, []
        plan = client._one_pass(self.known)
        with torch.no_grad():
            for step in range(plan.index.shape[1]):
                index = plan.index[:, step, : plan.width(step, step + 1)]
                rows.append(client._over_nodes(function, params, client.workspace.images(index)))
        table = torch.cat(rows, dim=1)
        node = torch.arange(len(self.known), device=table.device).view(-1, 1, 1)

        def pick(first: int, last: int, alive: int) -> Tensor:
            return table[node[:alive], where.index[:alive, first:last, : where.width(first, last)]]

        return pick


# What CUDA, cuBLAS and cuDNN say for want of memory where torch has no type for it.
NO_ROOM = ("out of memory", "alloc_failed", "unable to find an engine")


def _out_of_memory(error: Exception) -> bool:
    """Whether an accelerator's memory is full."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and any(w in said for w in NO_ROOM))


def keeps_parts(settings: Mapping[str, Any]) -> bool:
    """Whether nodes of ``strategy=NAME`` keep parts of the model to themselves."""
    client_class, _ = find_client(settings)
    return bool(client_class.is_personal(make_config_of_node(settings)))


def score(workspace: Workspace, model: Callable[[Tensor], Features], index: np.ndarray) -> tuple[float, float, int]:
    """Return (mean cross-entropy, accuracy, examples) of one model on the examples ``index``; (0, 0, 0) for none."""
    if len(index) == 0:
        return 0.0, 0.0, 0
    losses, correct = [], []
    with torch.no_grad():
        for rows in torch.from_numpy(index).to(workspace.device).split(workspace.evaluation_batch):
            y = workspace.labels(rows)
            logits = model(workspace.images(rows)).logits
            losses.append(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
            correct.append((logits.argmax(1) == y).sum())
    # Read at the end: on an accelerator each number is a wait.
    return sum(map(float, losses)) / len(index), sum(map(int, correct)) / len(index), len(index)


def _taken_apart(stacked: Tensors) -> dict[str, Sequence[Tensor]]:
    """Return the rows of tensors (B, ...), each on its own: a view would keep the stack alive, which memory outlives."""
    rows: dict[str, Sequence[Tensor]] = {name: value.unbind() for name, value in stacked.items()}
    if all(len(views) == 1 for views in rows.values()):
        return rows
    own: dict[str, Sequence[Tensor]] = {n: [torch.empty_like(view) for view in views] for n, views in rows.items()}
    for dtype in {value.dtype for value in stacked.values()}:
        names = [name for name, value in stacked.items() if value.dtype == dtype]
        # On an accelerator one operation, where unbind_copy is one for each row of each tensor.
        torch._foreach_copy_([row for name in names for row in own[name]], [view for name in names for view in rows[name]])
    return own


def _clip(params: list[Tensor], limit: float) -> None:
    """Scale each node's gradient so that its norm over all tensors is at most ``limit``."""
    grads = [p.grad for p in params if p.grad is not None]
    square = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0)
    factor = (limit / (square.sqrt() + 1e-6)).clamp_max(1)
    for grad in grads:
        grad.mul_(factor.view(-1, *[1] * (grad.dim() - 1)))
