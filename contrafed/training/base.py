"""Define the base class of all clients. A method states *what* is optimised, and the base class does it for a stack.

A method never loops over clients, opens a loader, moves a tensor to a device or names an engine.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from flwr.client import NumPyClient
from torch import Tensor
from torch.func import grad
from torch.utils._pytree import tree_map

from contrafed.core import codec
from contrafed.core.paper import Paper
from contrafed.core.split_model import Features, SplitModel
from contrafed.core.tensors import Tensors
from contrafed.training import local_round, loop
from contrafed.training.batches import Batch, Batches
from contrafed.training.client_stack import ClientStack, each_client, expand_like
from contrafed.training.errors import DeadlineError, LocalError, NoRoomError
from contrafed.training.local_round import Evaluation, Update
from contrafed.training.local_training import LocalTraining
from contrafed.training.loop import PARTS, Function, Loss, Losses, Step
from contrafed.training.losses import cross_entropy
from contrafed.training.workspace import Workspace

__all__ = [
    "PARTS",
    "Batch",
    "Client",
    "ClientStack",
    "Config",
    "DeadlineError",
    "Evaluation",
    "LocalError",
    "LocalTraining",
    "Losses",
    "NoRoomError",
    "Shapes",
    "Step",
    "Tensors",
    "Update",
    "expand_like",
]

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of a client that has none except the local training."""

    local: LocalTraining


class Client(NumPyClient):
    """One client or a stack of B clients of a federation. For a plain Flower user it is a ``NumPyClient`` of one client.

    A method sets ``Config`` in its module and overrides what it needs from the first section below.
    """

    # The parts of the model that are shared, and patterns of tensors' names: "encoder.stages.0.*", "!norm" (``loop.is_in``).
    shared: ClassVar[tuple[str, ...]] = PARTS
    whole_training_reason: ClassVar[str] = ""  # why it cannot stop at a deadline (participation.late=partial), or empty
    plain_sgd_reason: ClassVar[str] = ""  # why local training must be plain SGD, without momentum or Adam, or empty
    own_pull: ClassVar[str] = ""  # key of a pull in the place of local.proximal_weight, which is refused then, or empty
    upload: ClassVar[Literal["model", "delta"]] = "model"  # upload the trained tensors, or their change
    reads_images: ClassVar[bool] = False  # whether the loss reads ``batch.x`` as images, also if the encoder is frozen
    own_model: ClassVar[bool] = False  # whether a client is evaluated by a personal model although all parts are shared
    loss_names: ClassVar[tuple[str, ...]] = ()  # ``loss`` returns these and "loss". A reply with other names is rejected
    model_names: ClassVar[tuple[str, ...]] = ()  # ``eval_models`` returns these and "model", likewise
    mixed_on: ClassVar[tuple[str, ...]] = ("cuda",)  # devices on which local.mixed_precision has an effect
    # For the documentation. A method that uses another method's client states these in its FederatedStrategy.
    family: ClassVar[str] = ""  # family of methods, in the README's list
    paper: ClassVar[Paper | None] = None
    papers_of_variants: ClassVar[Mapping[str, Paper]] = {}  # papers of other methods that are this class with other settings
    # What the paper counts as traffic of a client in a round, down and up (``contrafed/training/traffic.py``).
    traffic: ClassVar[tuple[str, str] | None] = ("phi", "phi")

    def __init__(self, workspace: Workspace, clients: Sequence[int], client_states: Sequence[Tensors] | None = None) -> None:
        """Represent ``clients`` (partition ids). ``client_states`` holds each client's state, empty before its first round."""
        self.workspace, self.model = workspace, workspace.model
        self.config: Any = workspace.config
        self.shared_names = self.list_shared(self.model, self.config)
        shared = {loop.part_of(name) for name in self.shared_names}
        # What stays on the client of a part that is shared.
        self.local_names = [n for n in workspace.initial if n not in self.shared_names and loop.part_of(n) in shared]
        self.clients = list(clients)
        self.client_states: list[Tensors] = list(client_states) if client_states is not None else [{} for _ in clients]
        self.max_steps: Sequence[int | None] = ()  # a late client stops after so many steps of its local update
        self.server_round = 0  # of the local update or of the evaluation, 1-based
        self.diverged = ""  # where a single client's loss or weights stopped being finite in its last round
        self.losses: list[Losses] = []  # of the round's phases

    # ----------------------------------------------------------------------------------------------- what a method may say

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Return the parts of the model that are shared, if that depends on the configuration."""
        return cls.shared

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return names and shapes of all tensors that a client receives and uploads. No other tensors are exchanged."""
        shared, tensors = cls.list_shared(model, config), model.tensors()
        sent = shared - model.buffer_names if model.buffers_are == "frozen" else shared
        broadcast_spec = {f"model/{n}": tuple(v.shape) for n, v in tensors.items() if n in shared}
        return broadcast_spec, {f"{cls.upload}/{n}": tuple(v.shape) for n, v in tensors.items() if n in sent}

    @classmethod
    def list_shared(cls, model: SplitModel, config: Any) -> frozenset[str]:
        """Return the names of the shared tensors: those in ``shared_parts`` without local buffers."""
        parts, known = cls.shared_parts(config), model.__dict__.setdefault("shared_names", {})  # every client asks for them
        if (key := (str(parts), model.buffers_are)) not in known:
            local, norms = model.buffer_names if model.buffers_are == "local" else (), model.normalisation_names
            known[key] = frozenset(n for n in model.tensors() if n not in local and loop.is_in(n, parts, norms))
        found: frozenset[str] = known[key]
        return found

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the initial state of the client ``self.clients[0]``, given what it ``received``. Personal parts are added."""
        return {}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Do a round's local update: train ``stack.params``, write ``stack.state``, and return the upload (B, ...)."""
        self.train(stack)
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Any) -> dict[str, Tensor]:
        """Return one client's losses for a batch (no B axis): ``"loss"``, which is minimised, and those of ``loss_names``."""
        return {"loss": self.task_loss(self.forward(params, batch), batch)}

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the models (B, ...) to evaluate: ``"model"``, the client's, and those of ``model_names``.

        By default it is the received model with the client's personal parts. May train first, and client state stays unchanged.
        """
        return {"model": stack.params}

    def scores(self, features: Features, received: Tensors) -> Tensor:
        """Return the scores (b, C) by which one client predicts, by default the logits.

        ``received`` has the received tensors and those that ``eval_models`` adds: ``stack.received[NAME] = ...``, with B first.
        """
        return features.logits

    @classmethod
    def upload_training(cls, config: Any) -> LocalTraining:
        """Return the training settings of the upload, for strategies that divide by their number of steps."""
        return config.local  # type: ignore[no-any-return]

    @classmethod
    def smallest_batches(cls, config: Any, examples: int) -> dict[str, int]:
        """Return the examples in the smallest batch of each phase that trains the encoder, by the key of its batch size."""
        return {"strategy.local.batch_size": cls.upload_training(config).smallest_batch(examples)}

    def num_local_steps(self, examples: int) -> int:
        """Return how many steps a client with ``examples`` examples takes in a round. Scheduling uses it."""
        return int(self.config.local.steps(examples))

    # ------------------------------------------------------------------------------------------------- tools for a method

    def train(
        self,
        stack: ClientStack,
        *,
        params: Tensors | None = None,
        examples: Sequence[np.ndarray] | None = None,
        local_training: LocalTraining | None = None,
        parts: tuple[str, ...] = PARTS,
        loss: Loss | None = None,
        loss_inputs: Tensors | None = None,
        reference_models: Mapping[str, Tensors | tuple[Function, Tensors]] | None = None,
        before_step: Callable[[Step], dict[str, Any]] | None = None,
        repeat: int = 1,
        purpose: str = "batches",
    ) -> Losses:
        """Train ``parts`` of ``stack.params`` in place, and return every step's losses.

        Args:
            stack: The clients.
            params: Tensors (B, ...) to train in place of ``stack.params``.
            examples: Each client's examples, if not its whole training part. A client without any does not train.
            local_training: Settings of the training, by default ``config.local``.
            parts: Parts of the model to train.
            loss: The loss of one client, by default ``self.loss``.
            loss_inputs: Tensors (B, ...) that the loss receives by name.
            reference_models: Models (B, ...) whose representations z (B, b, D) of the batch the loss receives by name. A pair
                of one client's function of (model, images) and a model gives other outputs. Each image is computed once.
            before_step: Runs before every step without gradients. The loss receives its result in place of the reference
                outputs.
            repeat: Steps for each batch.
            purpose: Names the stream of the batches, and the optimizer state if it is kept. Each phase has its own.
        """
        models = {name: m if isinstance(m, tuple) else (self.represent, m) for name, m in (reference_models or {}).items()}
        local_training, loss = local_training or self.config.local, loss or self.loss
        phase = loop.Phase(local_training, parts, loss, loss_inputs or {}, models, before_step, repeat, purpose)
        if params is not None and isinstance(parts, tuple):
            loop.check_params(stack, params, parts)
        mine = replace(stack, params=stack.params if params is None else params, examples=list(examples or stack.examples))
        try:
            self.losses.append(loop.train(self, mine, phase))
        finally:
            stack.step, self.model.encoded_by = mine.step, {}  # errors name the step
        return self.losses[-1]

    def make_upload(self, stack: ClientStack) -> Tensors:
        """Return the shared parts for the upload: the trained tensors, or their change."""
        frozen = self.model.buffer_names if self.model.buffers_are == "frozen" else ()
        trained = {n: v.detach() for n, v in stack.params.items() if self.is_shared(n) and n not in frozen}
        if self.upload == "delta":
            trained = {n: v - stack.received[f"model/{n}"] for n, v in trained.items()}
        return {f"{self.upload}/{n}": v for n, v in trained.items()}

    def is_shared(self, name: str) -> bool:
        """Return whether a tensor of the model is shared."""
        return name in self.shared_names

    def shared_of(self, model: Tensors) -> Tensors:
        """Return the shared ones among a model's tensors."""
        return {n: v for n, v in model.items() if self.is_shared(n)}

    def parameters_of(self, model: Tensors) -> Tensors:
        """Return the parameters among a model's tensors, without its buffers."""
        buffers = self.model.buffer_names
        return {n: v for n, v in model.items() if loop.bare_name(n) not in buffers} if buffers else model

    def is_in(self, name: str, parts: tuple[str, ...]) -> bool:
        """Return whether a tensor of a model is in one of ``parts``, which may be patterns."""
        return loop.is_in(name, parts, self.model.normalisation_names)

    def forward(self, params: Tensors, batch: Batch, with_levels: bool = False) -> Features:
        """Run one client's model on its batch in a loss, with the step's dropout and buffers in training."""
        encoded = loop.is_encoded(self.model, params, batch.x)
        dropout = batch.dropout if self.model.dropout or self.model.draws else None
        with self.precision(), self.model.training_on(batch.mask, dropout), self.model.holding(params) as model:
            return self.widen_features(model(batch.x, dropout, with_levels, encoded=encoded))

    def task_loss(self, features: Features, batch: Batch) -> Tensor:
        """Compute the mean cross-entropy of one client's batch."""
        return cross_entropy(features.logits, batch.y, batch.mask)

    def features(self, params: Tensors, x: Tensor, with_levels: bool = False) -> Features:
        """Return all outputs of one client's model for images (n, ...), in evaluation mode."""
        with self.precision(), self.model.holding(params) as model:
            return self.widen_features(model(x, None, with_levels))

    def represent(self, params: Tensors, x: Tensor) -> Tensor:
        """Return one client's representations z (n, D) of images, in evaluation mode."""
        with self.precision(), self.model.holding(params) as model:
            return model.represent(x).to(self.workspace.dtype)

    def encode(self, params: Tensors, x: Tensor) -> Tensor:
        """Return one client's encoder outputs (n, E) of images."""
        with self.precision(), self.model.holding(params) as model:
            return model.encoder(x).to(self.workspace.dtype)  # type: ignore[no-any-return]

    def gradients(self, loss: Loss, params: Tensors, batch: Batch, loss_inputs: Any) -> Tensors:
        """Return the gradient (B, ...) of every client's loss at ``params`` (B, ...)."""

        def compute_minimised_loss(params: Tensors, buffers: Tensors, batch: Batch, loss_inputs: Any) -> Tensor:
            return loop.get_minimised_loss(loss, loop.scalars(loss, loss(params | buffers, batch, loss_inputs)))

        parameters = self.parameters_of(params)
        # Copies, because only the gradient of the step itself updates buffers.
        buffers = {name: value.clone() for name, value in params.items() if name not in parameters}
        found: Tensors = each_client(grad(compute_minimised_loss), parameters, buffers, batch, loss_inputs)
        return found

    def over_examples(
        self, stack: ClientStack, function: Callable[..., Tensors], params: Tensors, loss_inputs: Tensors,
        examples: Sequence[np.ndarray] | None = None,
    ) -> Tensors:  # fmt: skip
        """Sum ``function(params, batch, loss_inputs)``, one client's sums by name, over each client's training part (B, ...).

        It runs in evaluation mode, in the examples' order. ``examples`` (n,) replace the training part.
        """
        batches = Batches.one_pass(self.workspace, stack.examples if examples is None else examples, padded=examples is None)
        totals: Tensors = {}
        with torch.no_grad():
            for step in range(batches.index.shape[1]):
                stack.check_deadline()
                for name, value in each_client(function, params, batches.at(step, len(stack)), loss_inputs).items():
                    totals[name] = totals[name] + value if name in totals else value
        return totals

    def prototypes(self, stack: ClientStack) -> Tensors:
        """Return as messages each client's class means of z (B, C, D), zero for absent classes, and class counts (B, C).

        They are computed with ``stack.params``, in evaluation mode, over the whole training part. Papers also call them class
        centres or label-centroid representations.
        """
        totals = self.class_sums(stack)
        means = totals["z"] / totals["count"].clamp_min(1).unsqueeze(-1)
        return {"proto/mean": means, "proto/count": totals["count"]}

    def class_sums(self, stack: ClientStack) -> Tensors:
        """Return each client's sums by class, as ``prototypes``: ``z`` (B, C, D), ``square`` of |z|^2 and ``count`` (B, C)."""

        def sums(params: Tensors, batch: Batch, loss_inputs: Tensors) -> Tensors:
            with self.model.holding(params) as model:
                z = model.represent(batch.x)
            member = torch.nn.functional.one_hot(batch.y, self.model.num_classes).to(z) * batch.mask.unsqueeze(1)
            return {"z": member.T @ z, "square": member.T @ z.square().sum(1), "count": member.sum(0)}

        return self.over_examples(stack, sums, stack.params, {})

    def precision(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that applies ``mixed_precision``, if it has an effect."""
        # Autocast costs a small model a tenth of its forward pass, even if it is switched off.
        if not self._uses_mixed_precision:
            return contextlib.nullcontext()
        # Casts are not cached, because the cache survives neither vmap's wrappers nor a change of parameters.
        return torch.autocast(self.workspace.device.type, torch.bfloat16, cache_enabled=False)

    def widen_features(self, features: Features) -> Features:
        """Convert results to the workspace's type, which losses have."""
        return tree_map(lambda t: t.to(self.workspace.dtype), features) if self._uses_mixed_precision else features  # type: ignore[no-any-return]

    @property
    def _uses_mixed_precision(self) -> bool:
        return self.config.local.mixed_precision and self.workspace.device.type in self.mixed_on

    # --------------------------------------------------------------------------------------------------------- a round

    @classmethod
    def is_personal(cls, config: Any) -> bool:
        """Return whether clients are evaluated by personal models."""
        parts = cls.shared_parts(config)
        return cls.own_model or bool(set(PARTS) - set(parts)) or any(loop.is_pattern(part) for part in parts)

    @classmethod
    def has_client_state(cls, model: SplitModel, config: Any) -> bool:
        """Return whether a client has a state that persists between rounds."""
        personal = len(cls.list_shared(model, config)) < len(model.tensors())
        return personal or config.local.keep_optimizer or cls.init_client_state is not Client.init_client_state

    def update(self, received: Sequence[Tensors], server_round: int, deadline: float | None = None) -> list[Update]:
        """Train the stack's clients and return their updates, in the order of ``self.clients``.

        ``received[k]`` are the declared tensors for client k, which stay unchanged. ``deadline`` is a ``time.monotonic()``
        moment that is checked between steps. Raises ``DeadlineError``, or ``LocalError`` with its subclass ``NoRoomError``.
        """
        return local_round.update(self, received, server_round, deadline)

    def evaluate_clients(
        self, received: Sequence[Tensors], server_round: int, *, split: str = "test", final: bool = False,
        after_training: bool = False, deadline: float | None = None, models: Sequence[Tensors] | None = None,
        metrics: Sequence[str] = (), validation: bool = False,
    ) -> list[Evaluation]:  # fmt: skip
        """Evaluate every client's model, or that of ``models``, on its own ``split``: test or train. Changes nothing.

        ``final`` marks the run's last evaluation. With ``after_training`` the evaluation follows the local update of the next
        round, whose result is discarded. ``metrics``: further scores. ``validation``: also on the validation part.
        """
        how = local_round.EvaluationRequest(split, final, after_training, deadline, metrics, validation)
        return local_round.evaluate(self, received, server_round, how, models)

    # ------------------------------------------------------------------------------------------------ Flower's NumPyClient

    def names(self, direction: Literal["down", "up"]) -> list[str]:
        """Return the order of the arrays that ``fit`` takes (down) and returns (up)."""
        broadcast_spec, upload_spec = self.message_spec(self.model, self.config)
        return list(broadcast_spec if direction == "down" else upload_spec)

    def get_parameters(self, config: Mapping[str, Any]) -> list[np.ndarray]:  # type: ignore[override]
        """Return the initial shared tensors, in the order of ``names("down")``. Tables that start empty are zeros."""
        spec, initial = self.message_spec(self.model, self.config)[0], self.workspace.initial
        return codec.to_list(spec, {n: initial.get(n.removeprefix("model/"), torch.zeros(s)) for n, s in spec.items()})

    def fit(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[list[np.ndarray], int, dict[str, Any]]:
        """Train this one client and return its arrays, its number of training examples and its metrics.

        ``config["server-round"]`` is the 1-based round. Without it the client counts its own calls.
        """
        server_round, self.max_steps = int(config.get("server-round", self.server_round + 1)), [config.get("max-steps")]
        (update,) = self.update([codec.from_list(self.names("down"), parameters)], server_round)
        self.diverged = update.diverged
        if not update.diverged:
            self.client_states = [update.client_state]
        return codec.to_list(self.names("up"), update.tensors), update.num_examples, dict(update.metrics)

    def evaluate(self, parameters: list[np.ndarray], config: Mapping[str, Any]) -> tuple[float, int, dict[str, Any]]:
        """Evaluate this one client's model on its own ``config["split"]`` (test by default): loss, examples, accuracy.

        The entry ``final`` marks the run's last evaluation. With ``after-training`` the evaluation follows the local update of
        the round after ``config["server-round"]``, whose result is discarded. Changes no state.
        """
        received, split = codec.from_list(self.names("down"), parameters), str(config.get("split", "test"))
        server_round, final = int(config.get("server-round", self.server_round)), bool(config.get("final"))
        after = bool(config.get("after-training"))
        (evaluated,) = self.evaluate_clients([received], server_round, split=split, final=final, after_training=after)
        return evaluated.metrics["loss"], evaluated.num_examples, {n: v for n, v in evaluated.metrics.items() if n != "loss"}
