"""Define the base class of all strategies: it selects clients, writes messages, and turns replies into the next model."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from contrafed.core import codec, registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.paper import Paper
from contrafed.core.privacy.central import Config as CentralPrivacy
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors, add_prefix, move, settle, size_of
from contrafed.data.clock import Clock
from contrafed.data.participation import Participation
from contrafed.server import checks, chunks
from contrafed.server.aggregation import Aggregation
from contrafed.server.attributes import Attributes, PlannedRounds
from contrafed.server.buffers import leave_out
from contrafed.server.norm_limit import NormLimit
from contrafed.server.replies import Replies, Reply, largest, read_divergence, read_reply
from contrafed.server.round_log import Population, Round
from contrafed.server.scores import Score, read_score, record_scores
from contrafed.server.simulated_time import SimulatedTime, count_bytes, write_requests
from contrafed.training.base import Client

__all__ = ["FederatedStrategy", "Population", "Replies", "Reply", "Round", "Tensors", "strategy_class_of"]

Broadcast = Callable[[Tensors], Tensors]  # of the global model


class FederatedStrategy(Strategy):
    """A Flower ``Strategy`` whose subclasses state only the algorithm on the server.

    Subclasses set ``Config`` in their module and override ``aggregate``. If needed they also override ``check``,
    ``needs_individual_updates``, ``setup``, ``select``, ``broadcast``, ``broadcast_for_evaluation``, ``per_client_broadcast``,
    ``client_weights`` and ``eval_model``. Only ``self.state`` persists between rounds, and a checkpoint restores it. It holds
    tensors, arrays and numbers, in lists, tuples and dictionaries. The keys are text or whole numbers (``dict[int, Tensors]``:
    tables by partition id or round).

    A subclass may read ``config``, ``client_class``, ``client_config`` and ``rate`` (of the client), ``seed``, ``num_rounds``
    (planned), ``state``, ``round``, ``population`` and ``participation``. It may also read ``broadcast_spec`` and
    ``upload_spec`` (names and shapes of messages) and ``shared_names``. Set ``linear_in_updates`` if only means of replies are
    used, so that an aggregation may replace them.
    """

    family: ClassVar[str] = ""  # as in ``Client``, if the method is this class
    paper: ClassVar[Paper | None] = None
    linear_in_updates: ClassVar[bool] = False
    whole_training_reason: ClassVar[str] = ""  # as in ``Client``
    fixed_weights: ClassVar[tuple[str, ...]] = ()  # values of ``weights`` that make a weight independent of the cohort
    aggregates_empty_rounds: ClassVar[bool] = False  # whether ``aggregate`` is also called without replies
    buffers: frozenset[str] = frozenset()  # names of the model's buffers, which no strategy sees
    has_global_model: bool = True  # whether the server has a global model, if all parts are shared
    num_rounds = property(lambda self: self.planned.read())  # planned. A run whose method reads it cannot be given more

    def __init__(
        self,
        config: Any,
        *,
        client_class: type[Client],
        client_config: Any,
        model: SplitModel,
        population: Population,
        participation: Participation,
        settings: str,
        num_rounds: int,
        seed: int,
        max_norm: float | None = None,
        norm_limit: NormLimit | None = None,
        min_replies: int = 0,
        num_local_steps: Callable[[int], int] | None = None,
        after_training: bool = False,
        privacy: CentralPrivacy | None = None,
        aggregation: Aggregation | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Prepare a run of ``num_rounds`` rounds.

        Args:
            settings: The JSON that clients receive.
            max_norm: Larger joint L2 norms of a reply's tensors are rejected.
            norm_limit: Rejects replies far longer than others.
            min_replies: With fewer valid replies a round changes neither the model nor the server state.
            num_local_steps: Returns the steps of a client with so many examples, by which engines balance their workers.
            after_training: Evaluate clients after the next round's local update, whose result is discarded.
            privacy: Clip replies and add noise to their sums.
            aggregation: Replaces a mean of replies.
            clock: The clients' speeds, None without simulated time.
        """
        self.config, self.client_config, self.client_class, self.population = config, client_config, client_class, population
        self.broadcast_spec, self.upload_spec = client_class.message_spec(model, client_config)
        self.buffers, self.after_training = getattr(model, "buffer_names", frozenset()), after_training
        self.shared_names = [
            n.removeprefix("model/") for n in self.broadcast_spec if n.startswith("model/") and n[6:] not in self.buffers
        ]
        local_buffers = getattr(model, "buffers_are", "") == "local"
        self.personal = after_training or client_class.is_personal(client_config) or local_buffers
        names = {name for name, _ in model.named_parameters()} | self.buffers
        self.has_global_model = self.has_global_model and all(f"model/{name}" in self.broadcast_spec for name in names)
        self.participation, self.settings, self.seed, self.planned = participation, settings, seed, PlannedRounds(num_rounds)
        self.max_norm, self.min_replies, self.privacy, self.aggregation = max_norm, min_replies, privacy, aggregation
        self.norm_limit, self.num_local_steps = norm_limit or NormLimit(None), num_local_steps or (lambda examples: 1)
        self.time = None if clock is None else SimulatedTime(clock, self, participation)
        self.state, self.model, self.round = dict[str, Any](), Tensors(), Round(0, np.zeros(0, dtype=np.int64))
        self.on_aggregated: Callable[[Replies], None] | None = None  # called with valid replies, may write to ``self.round``
        self.chunks: chunks.Chunks | None = None  # of a round with a large cohort
        self._sent: list[tuple[Message, int]] = []
        self.received: dict[int, Tensors] = {}  # by partition id, the tensors that a client starts from in this round
        self._evaluating = ConfigRecord()  # of the last evaluation: whose scores are used, and what they are asked for
        self._forgetful: set[int] = set()  # clients whose loss of state is already reported, and that have not trained since
        self._attributes = Attributes(self)
        self.setup()
        if fault := self._attributes.find_setup_fault() or checks.state_fault(self):
            raise UserError(fault)

    @property
    def largest_reply(self) -> int:
        """The largest size of a valid reply, in bytes."""
        return largest(self.upload_spec)

    def rate(self, server_round: int) -> float:
        """Return the learning rate at the start of the local update in a 1-based round."""
        return float(self.client_config.local.rate(server_round))

    # ---------------------------------------------------------------------------------------------- what a method declares

    @classmethod
    def check(cls, config: Any, client: Choice, participation: Choice) -> None:
        """Raise ``UserError`` for a client or a participation pattern that the strategy does not support."""

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return what the strategy does with individual replies, which noise on sums cannot hide. Empty if it only sums."""
        return "reads replies one by one"

    def setup(self) -> None:
        """Prepare ``self.state`` before the first round."""

    def select(self, server_round: int) -> np.ndarray:
        """Return the clients to train, partition ids (m,): selected, available and with data.

        Called once a round, so a strategy may choose by its state and draw from (``self.seed``, purpose, round). The cohort is
        then in ``self.round.participants``.
        """
        clients = self.participation.participants(server_round)
        return clients[self.population.sizes[clients] > 0]

    def broadcast(self, model: Tensors) -> Tensors:
        """Return what every client receives: the shared tensors of the model."""
        return add_prefix("model", {name: model[name] for name in self.shared_names})

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return what clients receive for evaluation, by default the same as for training."""
        return self.broadcast(model)

    def per_client_broadcast(self, model: Tensors, client: int, evaluating: bool) -> Tensors | None:
        """Return tensors for this client alone that replace those of the broadcast, in training or when ``evaluating``."""
        return None

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the next global model from this round's ``model`` and valid ``replies``.

        Without replies it is called only if ``aggregates_empty_rounds`` is set. Both are float32 tensors by name. The result
        may be float64 and is stored as float32. Names that it does not contain keep their values. ``self.round.server_round``
        is the 1-based round. ``self.round.metrics`` and ``self.round.client_metrics`` are logged.
        """
        raise NotImplementedError

    def reply_weights(self, clients: np.ndarray, num_examples: np.ndarray) -> np.ndarray:
        """Return each reply's weight in a sum (m,), up to a common factor, for a strategy with ``linear_in_updates``.

        With it a large cohort is summed in chunks. It depends on the client alone. ``num_examples`` are (m,), float64.
        """
        raise NotImplementedError

    def client_weights(self) -> np.ndarray | None:
        """Return each client's weight in the last aggregated round (K,), also for clients that were not in the cohort.

        It is NaN for a client without a weight yet. None if only the cohort has weights.
        """
        return None

    def fixed_weight(self) -> float:
        """Return each reply's weight with one of ``fixed_weights``, if all clients have one probability."""
        raise NotImplementedError

    def eval_model(self, model: Tensors) -> Tensors:
        """Return the global model to evaluate and to save at the end, by default the one that clients train from."""
        return model

    # --------------------------------------------------------------------------------------------------- Flower's interface

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Write one message for each client that ``select`` returns."""
        clients = checks.select_clients(self, server_round)
        clients = clients if self.time is None else self.time.leave_out_busy(clients)
        self.model = codec.from_record(arrays)
        self.round = Round(server_round, clients)
        self.round.bytes_down = len(clients) * count_bytes(self.broadcast_spec)
        costs = checks.costs(self, clients)
        planned = costs if self.time is None else self.time.plan(self.round, costs)
        asked = write_requests({**config, "server-round": server_round, "settings": self.settings}, costs, planned)
        self.chunks = chunks.divide(self, grid, asked)
        if self.chunks is not None:
            return self.chunks.write()
        return self.write_messages(MessageType.TRAIN, server_round, self.model, self.broadcast, asked)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Check every reply, then aggregate the valid ones."""
        good = chunks.collect(self, replies)
        if len(good) < self.min_replies:
            self.round.notes.append(f"{len(good)} valid replies, min_replies={self.min_replies}: the model stays as it is")
            if len(good):
                self.round.rejected["too few"] += len(good)
        else:
            self.round.accepted = len(good)
            self._follow(good)
            self.model = checks.next_model(self, good)
            if self.on_aggregated is not None:
                self.on_aggregated(good)
        self.round.metrics |= {n: v for n, v in good.mean_metrics().items() if n not in self.round.metrics}
        self._sent, self.received = [], {}
        return codec.to_record(self.model), MetricRecord(dict(self.round.metrics))

    def next_model(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the model after a round. Without replies it is unchanged, unless ``aggregates_empty_rounds`` is set."""
        return self.aggregate(model, replies) if len(replies) or self.aggregates_empty_rounds else model

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask the clients in ``config["clients"]`` to evaluate their models. Client state stays unchanged.

        In the last round, or with ``config["final"]``, every client with data writes its model to the folder
        ``config["save"]``, if set. With ``config["best"]`` it is the folder next to it. With ``config["load"]`` they evaluate
        saved models, with ``config["validation"]`` also on their validation parts.
        """
        clients: Any = config.get("clients", [])
        final = server_round == self.planned.count or bool(config.get("final"))
        save = str(config.get("save", "")) if final or config.get("best") else ""
        self._evaluating, self.round.evaluating = config, bool(clients)
        if save:  # clients that are not evaluated have a model as well, also those with only test data
            held = self.population.num_held
            clients = sorted({*clients, *np.flatnonzero(self.population.sizes + held).tolist()})
        if not clients:
            return []
        scalars = ConfigRecord({"server-round": server_round, "settings": self.settings, "split": "test", "cost": 1})
        scalars.update(
            {"final": final, "save": save, "load": str(config.get("load", "")), "after-training": self.after_training}
        )
        scalars.update({key: config[key] for key in ("metrics", "validation", "best") if key in config})
        model = codec.from_record(arrays)
        asked = {int(client): scalars for client in clients}
        broadcast = self.broadcast if self.after_training else self.broadcast_for_evaluation
        return self.write_messages(MessageType.EVALUATE, server_round, model, broadcast, asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Check and summarise the clients' scores (``contrafed.server.scores``)."""
        clients: Any = self._evaluating.get("clients", [])
        scores, scored = list[Score](), set(clients)
        for client, reply in self._answers(replies, evaluating=True):
            self.round.hear(client, reply, self._forgetful, evaluating=True)
            try:
                score = read_score(client, reply, self.population, self.client_class.model_names, self._evaluating)
            except ValueError as error:
                self.round.rejected["evaluation malformed"] += 1
                self.round.failures.append(f"client {client}, evaluation: {error}")
            else:
                if client in scored:
                    scores.append(score)
        self._sent, self.received = [], {}
        record_scores(self.round, scores, self.population)
        found = self.round.client_evaluation
        return None if found is None else MetricRecord(dict(found))

    def mark_begun(self) -> None:
        """Record the attributes before the first round. Values that persist must be in ``self.state``."""
        self._attributes.mark()

    def summary(self) -> None:
        """Log nothing, because the run folder holds the configuration."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        on_round: Callable[[Round, ArrayRecord], bool | None] | None = None,
        first_round: int = 0,
    ) -> Result:
        """Run the rounds, as in Flower's loop, and call ``on_round`` after each. If it returns True, the run ends.

        Round 0 is the initial model. ``first_round``: a resumed run starts with the round after its checkpoint. Overridden
        because Flower's loop has no hook between rounds, which logging and checkpoints need.
        """
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        result.arrays = arrays
        self.mark_begun()
        for server_round in range(first_round, num_rounds + 1):
            began = time.perf_counter()
            if server_round > 0:
                messages = self.configure_train(server_round, arrays, train_config, grid)
                replies = chunks.exchange(self, grid, messages, timeout)
                received = time.perf_counter()
                arrays, result.train_metrics_clientapp[server_round] = self.aggregate_train(server_round, replies)
                settle(self.model)
                self.round.aggregate_seconds = time.perf_counter() - received
                result.arrays = arrays
            if evaluate_fn is not None and (scores := evaluate_fn(server_round, arrays)) is not None:
                self.round.evaluation = {name: float(value) for name, value in scores.items()}  # type: ignore[arg-type]
                result.evaluate_metrics_serverapp[server_round] = scores
                asking = list(self.configure_evaluate(server_round, arrays, evaluate_config, grid))
                if asking:
                    replies = grid.send_and_receive(asking, timeout=timeout)
                    if (summary := self.aggregate_evaluate(server_round, replies)) is not None:
                        result.evaluate_metrics_clientapp[server_round] = summary
            self.round.seconds = time.perf_counter() - began
            if on_round is not None and on_round(self.round, arrays):
                break
        return result

    # ------------------------------------------------------------------------------------------------ messages and answers

    def write_messages(
        self, kind: str, server_round: int, model: Tensors, broadcast: Broadcast, configs: Mapping[int, ConfigRecord]
    ) -> list[Message]:
        """Return a message for every client of ``configs``: the broadcast, one record for all, or with a client's own."""
        self._sent, self.received = [], {}
        with checks.refuse_edits(self, model.values(), "per_client_broadcast"):
            shared, model = checks.broadcast(self, broadcast, model), leave_out(model, self.buffers)
            common = checks.sent_fault(self, shared)  # once, because most strategies send the same to all clients
            record = codec.to_record({} if common else shared)
            for client, config in configs.items():
                own = self.per_client_broadcast(model, client, kind == MessageType.EVALUATE)
                if fault := common if own is None else checks.sent_fault(self, shared, own):
                    raise checks.build_request_error(self, server_round, fault)
                self.received[client] = shared if own is None else shared | own
                arrays = record if own is None else codec.to_record(self.received[client])
                content = codec.make_record(RecordDict, [(codec.ARRAYS, arrays), (codec.CONFIG, config)])
                message = Message(content, int(self.population.node_ids[client]), kind, group_id=str(server_round))
                self._sent.append((message, client))
        return [message for message, _ in self._sent]

    def _answers(self, replies: Iterable[Message], evaluating: bool) -> Iterator[tuple[int, Message]]:
        """Yield (partition id, answer) by partition id, and count missing, failed and unexpected answers by cause."""
        failed, late, what = ("evaluation failed",) * 2 + (", evaluation",) if evaluating else ("failed", "no answer", "")
        # Ids exist once the Grid has accepted the messages. Errors that Flower itself creates come "from node 1".
        asked = {message.metadata.message_id: client for message, client in self._sent}
        # In a fixed order, because Flower's depends on speed, and the first failed client is the one that is reported.
        for message in sorted(replies, key=lambda reply: asked.get(reply.metadata.reply_to_message_id, -1)):
            client = asked.pop(message.metadata.reply_to_message_id, None)
            if client is None:
                self.round.rejected["not asked for"] += 1
            elif message.has_error():
                self.round.rejected[failed] += 1
                said = codec.words(message.error.reason)
                # An error in a client's local update already names the client.
                self.round.failures.append(said if said.startswith(f"client {client}, ") else f"client {client}{what}: {said}")
            else:
                yield client, message
        if asked:
            self.round.rejected[late] += len(asked)
            self.round.failures += [f"client {client}{what}: no answer in time" for client in sorted(asked.values())]

    def accept(self, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the valid replies, and count rejected ones by cause. A failed client is treated as unavailable."""
        for client, message in self._answers(replies, evaluating=False):
            self.round.hear(client, message, self._forgetful, evaluating=False)  # also if the reply is rejected
            if self.participation.loses(self.round.server_round, client):
                self.round.lost += 1
                continue
            size, received = int(self.population.sizes[client]), self.received[client]
            rules = self.max_norm, self.client_class.loss_names, self.norm_limit.counters
            try:
                reply = read_reply(client, message, self.upload_spec, received, size, *rules)
            except ValueError as error:
                self.round.reject(client, str(error), read_divergence(message))
            else:
                self.round.bytes_up += size_of(reply.tensors)
                yield reply

    def _follow(self, replies: Replies) -> None:
        """Move the model and the server state to the replies' device, the GPU if this process trained on it."""
        if (device := replies.device) is not None:
            self.model = {name: value.to(device) for name, value in self.model.items()}
            move(self.state, device)


def strategy_class_of(server: Choice) -> type[FederatedStrategy]:
    """Return the ``FederatedStrategy`` class of a choice."""
    return registry.only_subclass(server.module, FederatedStrategy)
