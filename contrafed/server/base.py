"""The server half of every method: who trains, what nodes receive, and the rule that turns replies into the next model.

A method subclasses ``FederatedStrategy`` and writes ``aggregate``: a few lines of tensor algebra over the replies.
Everything else (participation, messages, bookkeeping, Flower's interface) is here; what a reply must be like is in
``contrafed/server/replies.py``.
"""

import math
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
from contrafed.core.tensors import Tensors, move, named, settle, size_of
from contrafed.data.participation import Participation
from contrafed.server import checks
from contrafed.server.aggregation import Aggregation
from contrafed.server.buffers import leave_out
from contrafed.server.replies import Replies, Reply, diverged, largest, read_reply
from contrafed.server.round_log import Population, Round
from contrafed.server.scores import Score, named_scores, read_score, summaries
from contrafed.training.base import Client

__all__ = ["FederatedStrategy", "Population", "Replies", "Reply", "Round", "Tensors", "strategy_class_of"]


class FederatedStrategy(Strategy):
    """A Flower ``Strategy`` whose subclasses only state the server rule.

    Subclasses set ``Config`` in their module and override ``aggregate`` and, where needed, ``check``, ``single_replies``,
    ``setup``, ``select``, ``broadcast``, ``broadcast_for_evaluation``, ``download``, ``node_weights`` and ``judged``.
    Everything that a rule carries from round to round lives in ``self.state``: tensors, arrays and numbers, in lists, tuples
    and dictionaries whose keys are text or whole numbers (``dict[int, Tensors]``: tables by partition id or round). A
    checkpoint brings it back as it was.

    A rule may read ``config``, ``client_class``, ``node_config`` and ``rate`` (of the node half), ``seed``, ``num_rounds``
    (planned), ``state``, ``round``, ``population``, ``participation``, ``down`` and ``up`` (names and shapes of what travels)
    and ``travelling``. ``averages = True`` says that means are all that it makes of replies, so that an aggregation may stand
    in for them; ``idle = True`` that it has something to do also where nobody replied.
    """

    family: ClassVar[str] = ""  # as ``Client`` has them, where the method is this class
    paper: ClassVar[Paper | None] = None
    averages: ClassVar[bool] = False
    fixed_weights: ClassVar[tuple[str, ...]] = ()  # values of ``weights`` with which no weight depends on who else takes part
    idle: ClassVar[bool] = False  # whether a round without a reply is the rule's business too
    buffers: frozenset[str] = frozenset()  # names of the model's buffers, which no strategy sees
    has_global_model: ClassVar[bool] = True  # whether the server's model is one, where all of it travels

    def __init__(
        self,
        config: Any,
        *,
        client_class: type[Client],
        node_config: Any,
        model: SplitModel,
        population: Population,
        participation: Participation,
        settings: str,
        num_rounds: int,
        seed: int,
        max_norm: float | None = None,
        min_replies: int = 0,
        work_of: Callable[[int], int] | None = None,
        post_train: bool = False,
        privacy: CentralPrivacy | None = None,
        aggregation: Aggregation | None = None,
    ) -> None:
        """Prepare a run of ``num_rounds`` rounds; ``node_config`` is the node half's, ``settings`` the JSON nodes receive.

        ``max_norm``: replies whose tensors' joint L2 norm is larger are rejected. With fewer than ``min_replies`` valid
        replies a round changes neither the model nor the server's state. ``work_of`` tells how many steps a node
        with so many examples takes, by which engines balance their workers. ``post_train``: nodes are judged after the next
        round's local work, of which nothing is kept. ``privacy``: replies are clipped and their sums have noise.
        ``aggregation``: what stands in for a mean of replies.
        """
        self.config, self.node_config, self.client_class = config, node_config, client_class
        self.down, self.up = client_class.messages(model, node_config)
        self.buffers = getattr(model, "buffer_names", frozenset())
        # The model's parameters that travel, by name.
        self.travelling = [n.removeprefix("model/") for n in self.down if n.startswith("model/") and n[6:] not in self.buffers]
        # Whether nodes are judged by models of their own, and whether there is a global model that can be.
        self.post_train = post_train
        self.personal = post_train or client_class.is_personal(node_config) or getattr(model, "buffers_are", "") == "local"
        names = {name for name, _ in model.named_parameters()} | self.buffers
        self.whole = self.has_global_model and all(f"model/{name}" in self.down for name in names)
        self.population, self.participation = population, participation
        self.settings, self.num_rounds, self.seed = settings, num_rounds, seed
        self.max_norm, self.min_replies, self.privacy, self.aggregation = max_norm, min_replies, privacy, aggregation
        self.work_of = work_of or (lambda examples: 1)
        self.state: dict[str, Any] = {}
        self.model: Tensors = {}
        self.round = Round(0, np.zeros(0, dtype=np.int64))
        # Called with a round's good replies when the rule has taken them; may write to ``self.round``.
        self.watch: Callable[[Replies], None] | None = None
        self._sent: list[tuple[Message, int]] = []
        self._received: dict[int, Tensors] = {}  # by partition id, what a node works from this round
        self._scored: set[int] = set()  # the nodes whose evaluation counts
        self._forgetful: set[int] = set()  # those whose lost memory is known, and who have not trained since
        self.setup()
        if fault := checks.state_fault(self):
            raise UserError(fault)

    @property
    def largest_reply(self) -> int:
        """Bytes that no good reply has more of."""
        return largest(self.up)

    def rate(self, server_round: int) -> float:
        """Return the learning rate with which nodes' local work begins in a 1-based round."""
        return float(self.node_config.local.rate(server_round))

    # ---------------------------------------------------------------------------------------------- what a method declares

    @classmethod
    def check(cls, config: Any, node: Choice, participation: Choice) -> None:
        """Raise ``UserError`` for a node half or a participation pattern that the rule cannot go with; before anything runs."""

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """Return what the rule does with single replies, so that noise on sums hides none; empty where it sums alone."""
        return "reads replies one by one"

    def setup(self) -> None:
        """Prepare ``self.state`` before the first round."""

    def select(self, server_round: int) -> np.ndarray:
        """Return which nodes are asked to train, partition ids (m,): selected, available and holding data.

        Called once a round, so that a rule may choose by its state and draw from (``self.seed``, purpose, round); who was
        asked is ``self.round.participants``.
        """
        nodes = self.participation.participants(server_round)
        return nodes[self.population.sizes[nodes] > 0]

    def broadcast(self, model: Tensors) -> Tensors:
        """Return what every node receives: the shared tensors of the model."""
        return named("model", {name: model[name] for name in self.travelling})

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return what nodes receive to be judged by; by default what they would train from."""
        return self.broadcast(model)

    def download(self, model: Tensors, node: int, judging: bool) -> Tensors | None:
        """Return tensors for this node alone, which replace the broadcast's of the same name; None for no such tensors.

        ``judging``: the node is asked to score its model, not to train.
        """
        return None

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the next global model from this round's ``model`` and valid ``replies``.

        Without a reply it is called only if the rule is ``idle``. Both are float32 tensors by name; the result may be float64
        and is stored as float32, and what it leaves out stays as it is. ``self.round.server_round`` is the 1-based round; what
        a rule writes to ``self.round.metrics`` and ``self.round.node_metrics`` is logged.
        """
        raise NotImplementedError

    def node_weights(self) -> np.ndarray | None:
        """Return what every node weighed, or would have weighed, in the round that was aggregated last (K,).

        NaN for a node that the rule has no weight for yet. None for a rule under which a node that is away has none.
        """
        return None

    def fixed_weight(self) -> float:
        """Return what each reply counts with one of ``fixed_weights`` where nodes have one probability."""
        raise NotImplementedError

    def judged(self, model: Tensors) -> Tensors:
        """Return the global model that is scored, and that a run leaves at its end; by default the one nodes train from."""
        return model

    # --------------------------------------------------------------------------------------------------- Flower's interface

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Write one message per node that ``select`` names."""
        nodes = checks.selected(self, server_round)
        self.model = codec.from_record(arrays)
        self.round = Round(server_round, nodes)
        self.round.bytes_down = len(nodes) * sum(4 * math.prod(shape) for shape in self.down.values())
        costs = checks.costs(self, nodes)
        common = {**config, "server-round": server_round, "settings": self.settings}
        scalars = {cost: ConfigRecord({**common, "cost": cost}) for cost in set(costs.values())}  # nodes of one cost share one
        asked = {node: scalars[cost] for node, cost in costs.items()}
        return self._write(MessageType.TRAIN, server_round, self.model, self.broadcast, asked)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Check every reply, then apply the method's rule to the good ones."""
        good = Replies(self._valid(replies), self.aggregation)
        if len(good) < self.min_replies:
            self.round.notes.append(f"{len(good)} valid replies, min_replies={self.min_replies}: the model stays as it is")
            if len(good):
                self.round.rejected["too few"] += len(good)
        else:
            self._follow(good)
            self.model = checks.next_model(self, good)
            if self.watch is not None:
                self.watch(good)
        self.round.metrics |= {n: v for n, v in good.mean_metrics().items() if n not in self.round.metrics}
        self._sent, self._received = [], {}
        return codec.to_record(self.model), MetricRecord(dict(self.round.metrics))

    def next_model(self, model: Tensors, replies: Replies) -> Tensors:
        """Return what the rule makes of a round; the model as it is where nobody replied, unless the rule is ``idle``."""
        return self.aggregate(model, replies) if len(replies) or self.idle else model

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask ``config["nodes"]`` to score their models; a read-only message.

        In the last round, or with ``config["final"]``, ``config["save"]``, a folder, has every node that holds data write its
        model; ``config["load"]`` has them score saved ones.
        """
        nodes: Any = config.get("nodes", [])
        final = server_round == self.num_rounds or bool(config.get("final"))
        save = str(config.get("save", "")) if final else ""
        self._scored, self.round.judging = set(nodes), bool(nodes)
        if save:  # nodes that are not scored have a model as well, also those that only test
            tests = 0 if self.population.num_test is None else self.population.num_test
            nodes = sorted(self._scored | set(np.flatnonzero(self.population.sizes + tests).tolist()))
        if not nodes:
            return []
        scalars = ConfigRecord({"server-round": server_round, "settings": self.settings, "split": "test", "cost": 1})
        scalars.update({"final": final, "save": save, "load": str(config.get("load", "")), "post-train": self.post_train})
        scalars.update({key: config[key] for key in ("metrics",) if key in config})
        model = codec.from_record(arrays)
        asked = {int(node): scalars for node in nodes}
        broadcast = self.broadcast if self.post_train else self.broadcast_for_evaluation
        return self._write(MessageType.EVALUATE, server_round, model, broadcast, asked)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' scores: by examples, plainly, their standard deviation, and the worst tenth.

        Other models that a node half judges beside the one that counts are reported under their names, and nodes that are
        held out under ``held_out``.
        """
        scores: list[Score] = []
        for node, reply in self._answers(replies, judging=True):
            self.round.hear(node, reply, self._forgetful, judging=True)
            try:
                score = read_score(node, reply, self.population.num_test)
            except ValueError as error:
                self.round.rejected["evaluation malformed"] += 1
                self.round.failures.append(f"node {node}, evaluation: {error}")
            else:
                if score.num_examples and node in self._scored:
                    scores.append(score)
        self._sent, self._received = [], {}
        if not scores:
            return None
        scores.sort(key=lambda score: score.node)
        for model in sorted({name for score in scores for name in score.models}):
            found = [score for score in scores if model in score.models]
            ids = np.array([score.node for score in found])
            for name in named_scores(found, model):
                values = np.array([score.models[model][name] for score in found])
                self.round.node_metrics[f"{model}/{name}" if model else name] = (ids, values)
        self.round.node_evaluation = summaries(scores, self.population.num_nodes - self.population.num_held_out)
        return MetricRecord(dict(self.round.node_evaluation))

    def mark_begun(self) -> None:
        """Remember what the strategy has before its first round; what lasts and comes later belongs into ``self.state``."""
        self._begun = {"_begun", *vars(self)}

    def summary(self) -> None:
        """Nothing to log: the run folder holds the configuration."""

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
        """Run the rounds: Flower's own loop, with ``on_round`` called after each (round 0 is the initial model); True ends it.

        ``first_round``: a run that goes on starts with the round after its checkpoint's.

        Overridden because Flower's has no hook between rounds, on which logging and checkpoints depend.
        """
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        result.arrays = arrays
        self.mark_begun()
        for server_round in range(first_round, num_rounds + 1):
            began = time.perf_counter()
            if server_round > 0:
                messages = self.configure_train(server_round, arrays, train_config, grid)
                replies = grid.send_and_receive(messages, timeout=timeout)
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

    def _write(
        self,
        kind: str,
        server_round: int,
        model: Tensors,
        broadcast: Callable[[Tensors], Tensors],
        configs: Mapping[int, ConfigRecord],
    ) -> list[Message]:
        """Return a message for every node of ``configs``: what is broadcast, one record for all, or with its own in it."""
        self._sent, self._received = [], {}
        shared, model = checks.broadcast(self, broadcast, model), leave_out(model, self.buffers)
        common = checks.sent_fault(self, shared)  # once: to most rules all nodes are alike
        record = codec.to_record({} if common else shared)
        for node, config in configs.items():
            own = self.download(model, node, kind == MessageType.EVALUATE)
            if fault := common if own is None else checks.sent_fault(self, shared, own):
                raise checks.refused(self, server_round, fault)
            self._received[node] = shared if own is None else shared | own
            arrays = record if own is None else codec.to_record(self._received[node])
            content = RecordDict({codec.ARRAYS: arrays, codec.CONFIG: config})
            message = Message(content, int(self.population.node_ids[node]), kind, group_id=str(server_round))
            self._sent.append((message, node))
        return [message for message, _ in self._sent]

    def _answers(self, replies: Iterable[Message], judging: bool) -> Iterator[tuple[int, Message]]:
        """Yield (partition id, answer) of what was asked, by partition id; count by cause what is none."""
        failed, late, what = ("evaluation failed",) * 2 + (", evaluation",) if judging else ("failed", "no answer", "")
        # Ids exist once the Grid has taken the messages. Errors that Flower itself makes come "from node 1".
        asked = {message.metadata.message_id: node for message, node in self._sent}
        # In an order of our own: Flower's is who was first, and the first node that fails is the one that is named.
        for message in sorted(replies, key=lambda reply: asked.get(reply.metadata.reply_to_message_id, -1)):
            node = asked.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                self.round.rejected["not asked for"] += 1
            elif message.has_error():
                self.round.rejected[failed] += 1
                said = codec.words(message.error.reason)
                # What failed in a node's work names the node itself.
                self.round.failures.append(said if said.startswith(f"node {node}, ") else f"node {node}{what}: {said}")
            else:
                yield node, message
        if asked:
            self.round.rejected[late] += len(asked)
            self.round.failures += [f"node {node}{what}: no answer in time" for node in sorted(asked.values())]

    def _valid(self, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the replies that count; count the others by cause. A failed node is an absent node."""
        for node, message in self._answers(replies, judging=False):
            self.round.hear(node, message, self._forgetful, judging=False)  # also where the reply does not count
            if self.participation.loses(self.round.server_round, node):
                self.round.lost += 1
                continue
            size = int(self.population.sizes[node])
            try:
                reply = read_reply(node, message, self.up, self._received[node], size, self.max_norm)
            except ValueError as error:
                self.round.reject(node, str(error), diverged(message))
            else:
                self.round.bytes_up += size_of(reply.tensors)
                yield reply

    def _follow(self, replies: Replies) -> None:
        """Have the model and the server's state where the replies are: on the GPU that this very process trained them on."""
        device = next((tensor.device for reply in replies for tensor in reply.tensors.values()), None)
        if device is None:
            return
        self.model = {name: value.to(device) for name, value in self.model.items()}
        move(self.state, device)


def strategy_class_of(server: Choice) -> type[FederatedStrategy]:
    """Return the ``FederatedStrategy`` class of a server rule."""
    return registry.only_subclass(server.module, FederatedStrategy)
