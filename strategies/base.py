"""The server half of every method: who trains, which replies count, and the rule that turns them into the next model.

A method subclasses ``FederatedStrategy`` and writes ``aggregate``: a few lines of tensor algebra over the replies.
Everything else (participation, messages, validation, bookkeeping, Flower's interface) is here.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils._pytree import tree_map

from clients.base import Client
from clients.training.workspace import find_client
from core import codec, registry
from core.combine import combine
from core.config import build
from core.tensors import Tensors, group, size_of
from models.base import SplitModel
from partitions.participation.base import Participation

# The header of a .npy file of ours has 128 bytes; more than this is none.
NPY_HEADER = 4096
# Bytes of a reply beside its tensors, at the most: metadata, metrics, and what a failed node says.
AROUND = 2**20


@dataclass
class Population:
    """What the server knows of all K nodes; a node's index in these arrays is its partition id."""

    sizes: np.ndarray  # (K,) training examples
    node_ids: np.ndarray  # (K,) Flower's node ids

    @property
    def num_nodes(self) -> int:
        """K."""
        return len(self.sizes)

    @property
    def num_holders(self) -> int:
        """How many nodes hold any data; a node without never takes part and is not counted by any rule."""
        return int(np.count_nonzero(self.sizes))


@dataclass
class Reply:
    """One node's valid reply."""

    node: int
    tensors: Tensors
    num_examples: int
    metrics: dict[str, float]


class Replies(Sequence[Reply]):
    """The valid replies of a round, sorted by partition id so that sums do not depend on who answered first."""

    def __init__(self, replies: Iterable[Reply]) -> None:
        self._replies = sorted(replies, key=lambda reply: reply.node)

    def __len__(self) -> int:
        return len(self._replies)

    def __getitem__(self, index: Any) -> Any:
        return self._replies[index]

    @property
    def nodes(self) -> np.ndarray:
        """Partition ids (m,)."""
        return np.array([reply.node for reply in self._replies], dtype=np.int64)

    @property
    def num_examples(self) -> np.ndarray:
        """Training examples per reply (m,), float64."""
        return np.array([reply.num_examples for reply in self._replies], dtype=np.float64)

    def group(self, name: str) -> list[Tensors]:
        """Return every reply's tensors ``NAME/x`` under the name x."""
        return [group(reply.tensors, name) for reply in self._replies]

    def weighted_sum(self, group: str, weights: np.ndarray) -> Tensors:
        """Return ``sum_k weights[k] * tensor_k`` for every tensor of ``group``, accumulated in float64.

        ``weights`` is (m,); names come without their group. Raises ``ValueError`` without replies.
        """
        if not self._replies:
            raise ValueError("no replies to sum")
        if len(weights) != len(self._replies):
            raise ValueError(f"{len(weights)} weights for {len(self._replies)} replies")
        return combine(self.group(group), weights.tolist())

    def mean(self, group: str, weights: np.ndarray) -> Tensors:
        """Return the weighted mean of every tensor of ``group`` in float64; the weights are normalised here."""
        return self.weighted_sum(group, weights / weights.sum())


@dataclass
class Round:
    """What happened in a round, for the log."""

    server_round: int
    participants: np.ndarray  # partition ids that were asked to train
    metrics: dict[str, float] = field(default_factory=dict)  # means over replies, weighted by examples
    evaluation: dict[str, float] | None = None  # of the global model, on the server
    rejected: Counter[str] = field(default_factory=Counter)  # cause -> replies
    failures: list[str] = field(default_factory=list)  # what failed nodes said
    notes: list[str] = field(default_factory=list)  # what else there is to say of nodes
    memory_lost: int = 0  # nodes whose memory could not be read back
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    node_metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)  # name -> (nodes, values)
    node_evaluation: dict[str, float] | None = None


class FederatedStrategy(Strategy):
    """A Flower ``Strategy`` whose subclasses only state the server rule.

    Subclasses set ``Config`` in their module and override ``aggregate``; ``setup`` prepares server state. Everything a
    strategy carries from round to round lives in ``self.state`` (named tensors and arrays), ready for a checkpoint.
    """

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
        max_norm: float | None = None,
        min_replies: int = 0,
        work_of: Callable[[int], int] | None = None,
    ) -> None:
        """Prepare a run of ``num_rounds`` rounds; ``node_config`` is the node half's, ``settings`` the JSON nodes receive.

        ``max_norm``: replies whose tensors' joint L2 norm is larger are rejected. With fewer than ``min_replies`` valid
        replies a round changes neither the model nor the server's state. ``work_of`` tells how many steps a node
        with so many examples takes, by which engines balance their workers.
        """
        self.config = config
        self.down, self.up = client_class.messages(model, node_config)
        # The model's tensors that travel, by name.
        self.travelling = [name.removeprefix("model/") for name in self.down if name.startswith("model/")]
        # Whether some of a node's model never leaves it.
        self.personal = any(f"model/{name}" not in self.down for name, _ in model.named_parameters())
        self.population = population
        self.participation = participation
        self.settings = settings
        self.num_rounds = num_rounds
        self.max_norm = max_norm
        self.min_replies = min_replies
        self.work_of = work_of or (lambda examples: 1)
        self.state: dict[str, Any] = {}
        self.model: Tensors = {}
        self.round = Round(0, np.zeros(0, dtype=np.int64))
        self._sent: list[tuple[Message, int]] = []
        self._scored: set[int] = set()  # the nodes whose evaluation counts
        self.setup()

    @property
    def largest_reply(self) -> int:
        """Bytes that no good reply has more of: its tensors in double precision, and what is around them."""
        return sum(8 * math.prod(shape) + NPY_HEADER for shape in self.up.values()) + AROUND

    # ---------------------------------------------------------------------------------------------- what a method declares

    def setup(self) -> None:
        """Prepare ``self.state`` before the first round."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the next global model from this round's ``model`` and valid ``replies``.

        Called every round, also with no reply at all. Both are float32 tensors by name; the result may be float64 and is
        stored as float32. ``self.round.server_round`` is the 1-based round.
        """
        raise NotImplementedError

    def download(self, model: Tensors, node: int) -> Tensors | None:
        """Return tensors that are sent to this node only, or None when every node receives the same."""
        return None

    def broadcast(self, model: Tensors) -> Tensors:
        """Return what every node receives: the shared tensors of the model."""
        return {f"model/{name}": model[name] for name in self.travelling}

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return what nodes receive to be judged by; by default what they would train from."""
        return self.broadcast(model)

    # --------------------------------------------------------------------------------------------------- Flower's interface

    def participants(self, server_round: int) -> np.ndarray:
        """Return which nodes are asked to train: selected, available and holding data."""
        nodes = self.participation.participants(server_round)
        return nodes[self.population.sizes[nodes] > 0]

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Write one message per node that was selected, is available and holds data."""
        nodes = self.participants(server_round)
        self.model = codec.from_record(arrays)
        self.round = Round(server_round, nodes)
        shared = codec.to_record(self.broadcast(self.model))
        size = sum(4 * math.prod(shape) for shape in self.down.values())
        self._sent = []
        scalars: dict[int, ConfigRecord] = {}  # by cost: all nodes of one share a record
        for node in nodes.tolist():
            own = self.download(self.model, node)
            record = shared
            if own is not None:
                record = shared.copy()
                record.update(codec.to_record(own))
            cost = self.work_of(int(self.population.sizes[node]))
            if cost not in scalars:
                scalars[cost] = ConfigRecord({**config, "server-round": server_round, "settings": self.settings, "cost": cost})
            content = RecordDict({codec.ARRAYS: record, codec.CONFIG: scalars[cost]})
            message = Message(content, int(self.population.node_ids[node]), MessageType.TRAIN, group_id=str(server_round))
            self._sent.append((message, node))
            self.round.bytes_down += size
        return [message for message, _ in self._sent]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every reply, then apply the method's rule to the good ones."""
        good = Replies(self._valid(replies))
        if len(good) < self.min_replies:
            self.round.notes.append(f"{len(good)} valid replies, min_replies={self.min_replies}: the model stays as it is")
            if len(good):
                self.round.rejected["too few"] += len(good)
        else:
            self._follow(good)
            model = self.aggregate(self.model, good)
            self.model = {name: model[name].to(old.dtype) for name, old in self.model.items()}
        if len(good):
            weights = good.num_examples / good.num_examples.sum()
            names = [name for name in good[0].metrics if all(name in reply.metrics for reply in good)]
            self.round.metrics = {n: float(sum(w * r.metrics[n] for w, r in zip(weights, good, strict=True))) for n in names}
        self._sent = []
        return codec.to_record(self.model), MetricRecord(dict(self.round.metrics))

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        """Ask ``config["nodes"]`` to score their models; a read-only message.

        In the last round ``config["save"]``, a folder, has every node that holds data write its model; ``config["load"]`` has
        them score saved ones.
        """
        nodes: Any = config.get("nodes", [])
        final = server_round == self.num_rounds
        save = str(config.get("save", "")) if final else ""
        self._scored = set(nodes)
        if save:  # nodes that are not scored have a model as well
            nodes = sorted(self._scored | set(np.flatnonzero(self.population.sizes).tolist()))
        if not nodes:
            return []
        record = codec.to_record(self.broadcast_for_evaluation(codec.from_record(arrays)))
        scalars = ConfigRecord({"server-round": server_round, "settings": self.settings, "split": "test", "cost": 1})
        scalars.update({"final": final, "save": save, "load": str(config.get("load", ""))})
        content = RecordDict({codec.ARRAYS: record, codec.CONFIG: scalars})
        self._sent = [
            (
                Message(content, int(self.population.node_ids[n]), MessageType.EVALUATE, group_id=str(server_round)),
                int(n),
            )
            for n in nodes
        ]
        return [message for message, _ in self._sent]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the nodes' scores: by examples, plainly, their standard deviation, and the worst tenth."""
        asked = self._asked()
        rows: list[tuple[int, float, float, int]] = []
        for reply in replies:
            node = asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                self.round.rejected["not asked for"] += 1
                continue
            if reply.has_error():
                self.round.rejected["evaluation failed"] += 1
                self.round.failures.append(f"node {node}, evaluation: {reply.error.reason}")
                continue
            self._note(node, reply)
            scores: Any = reply.content.get(codec.METRICS, {})
            try:
                row = (node, float(scores["accuracy"]), float(scores["loss"]), int(scores["num-examples"]))
                if not all(map(math.isfinite, row)) or row[-1] < 0:
                    raise ValueError("not finite")
            except (KeyError, TypeError, ValueError):
                self.round.rejected["evaluation malformed"] += 1
                self.round.failures.append(f"node {node}, evaluation: malformed content")
                continue
            if row[-1] and node in self._scored:
                rows.append(row)
        if asked:
            self.round.rejected["evaluation failed"] += len(asked)
            self.round.failures += [f"node {node}, evaluation: no answer in time" for node in sorted(asked.values())]
        self._sent = []
        if not rows:
            return None
        nodes, accuracy, loss, examples = (np.array(column) for column in zip(*sorted(rows), strict=True))
        worst = np.sort(accuracy)[: max(1, len(accuracy) // 10)]
        self.round.node_metrics["accuracy"] = (nodes, accuracy)
        self.round.node_evaluation = {
            "accuracy": float(np.average(accuracy, weights=examples)),
            "accuracy_mean": float(accuracy.mean()),
            "accuracy_std": float(accuracy.std()),
            "accuracy_worst_decile": float(worst.mean()),
            "loss": float(np.average(loss, weights=examples)),
        }
        return MetricRecord(dict(self.round.node_evaluation))

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
        on_round: Callable[[Round, ArrayRecord], None] | None = None,
        first_round: int = 0,
    ) -> Result:
        """Run the rounds: Flower's own loop, with ``on_round`` called after each (round 0 is the initial model).

        ``first_round``: a run that goes on starts with the round after its checkpoint's.

        Overridden because Flower's has no hook between rounds, on which logging and checkpoints depend.
        """
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        result.arrays = arrays
        for server_round in range(first_round, num_rounds + 1):
            began = time.perf_counter()
            if server_round > 0:
                messages = self.configure_train(server_round, arrays, train_config, grid)
                replies = grid.send_and_receive(messages, timeout=timeout)
                new, metrics = self.aggregate_train(server_round, replies)
                arrays = result.arrays = new if new is not None else arrays
                if metrics is not None:
                    result.train_metrics_clientapp[server_round] = metrics
            if evaluate_fn is not None and (scores := evaluate_fn(server_round, arrays)) is not None:
                self.round.evaluation = {name: float(value) for name, value in scores.items()}  # type: ignore[arg-type]
                result.evaluate_metrics_serverapp[server_round] = scores
                asking = list(self.configure_evaluate(server_round, arrays, evaluate_config, grid))
                if asking:
                    replies = grid.send_and_receive(asking, timeout=timeout)
                    if (summary := self.aggregate_evaluate(server_round, replies)) is not None:
                        result.evaluate_metrics_clientapp[server_round] = summary
            self.round.seconds = time.perf_counter() - began
            if on_round is not None:
                on_round(self.round, arrays)
        return result

    # -------------------------------------------------------------------------------------------------------------- replies

    def _asked(self) -> dict[str, int]:
        """Message id -> partition id; ids exist once the Grid has taken the messages."""
        return {message.metadata.message_id: node for message, node in self._sent}

    def _valid(self, replies: Iterable[Message]) -> Iterator[Reply]:
        """Yield the replies that count; count the others by cause. A failed node is an absent node."""
        asked = self._asked()
        for message in replies:
            # Errors that Flower itself makes come "from node 1", so the request's id says whose they are.
            node = asked.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                self.round.rejected["not asked for"] += 1
            elif message.has_error():
                self.round.rejected["failed"] += 1
                self.round.failures.append(f"node {node}: {message.error.reason}")
            else:
                try:
                    reply = self._check(node, message)
                except ValueError as error:
                    self.round.rejected[str(error)] += 1
                    self.round.failures.append(f"node {node}: {error}")
                else:
                    self._note(node, message)
                    self.round.bytes_up += size_of(reply.tensors)
                    yield reply
        if asked:
            self.round.rejected["no answer"] += len(asked)
            self.round.failures += [f"node {node}: no answer in time" for node in sorted(asked.values())]

    def _follow(self, replies: Replies) -> None:
        """Have the model and the server's state where the replies are: on the GPU that this very process trained them on."""
        device = next((tensor.device for reply in replies for tensor in reply.tensors.values()), None)
        if device is None or all(tensor.device == device for tensor in self.model.values()):
            return

        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        self.model = tree_map(moved, self.model)
        self.state |= tree_map(moved, self.state)

    def _note(self, node: int, message: Message) -> None:
        """Keep what a node says of itself beside its reply."""
        about = message.content.get(codec.CONFIG)
        if isinstance(about, ConfigRecord) and "memory-lost" in about:
            self.round.memory_lost += 1
            self.round.notes.append(f"node {node} begins with an empty memory: {about['memory-lost']!s}")

    def _check(self, node: int, message: Message) -> Reply:
        """Return a reply's content, or raise ``ValueError`` with the cause; shapes are checked before bytes are read."""
        arrays, metrics = message.content.get(codec.ARRAYS), message.content.get(codec.METRICS)
        if not isinstance(arrays, ArrayRecord) or not isinstance(metrics, MetricRecord):
            raise ValueError("malformed content")
        if set(arrays) != set(self.up):
            raise ValueError("wrong tensor names")
        for name, shape in self.up.items():
            if tuple(arrays[name].shape) != shape:
                raise ValueError("wrong shape")
            if arrays[name].dtype not in ("float32", "float64"):
                raise ValueError("wrong dtype")
            _check_bytes(arrays[name])
        count = metrics.get("num-examples")
        if not isinstance(count, int) or count <= 0:
            raise ValueError("no examples")
        try:
            tensors = {name: codec.to_tensor(arrays[name]) for name in self.up}
        except (TypeError, ValueError, OSError) as error:
            raise ValueError("malformed content") from error
        if any(tuple(t.shape) != self.up[name] for name, t in tensors.items()):
            raise ValueError("wrong shape")
        norm = _norm(tensors.values())
        if not math.isfinite(norm):
            raise ValueError("not finite")
        if self.max_norm is not None and norm > self.max_norm:
            raise ValueError("norm too large")
        others = {n: float(v) for n, v in metrics.items() if n != "num-examples" and isinstance(v, (int, float))}
        return Reply(node, tensors, count, others)


def _check_bytes(array: Array) -> None:
    """Raise ``ValueError`` unless the bytes of an array are as many as it says: NumPy would allocate what a header claims."""
    if isinstance(array, codec.TensorArray):
        return
    size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
    if len(array.data) > size + NPY_HEADER:
        raise ValueError("too large")
    file = BytesIO(array.data[:NPY_HEADER])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    except Exception as error:  # the header is a Python literal that anybody may have written
        raise ValueError("malformed content") from error
    if shape != array.shape or dtype != np.dtype(array.dtype):
        raise ValueError("wrong shape")
    if len(array.data) - file.tell() != size:
        raise ValueError("malformed content")


def _norm(tensors: Iterable[Tensor]) -> float:
    """Return the joint L2 norm of tensors; infinite or NaN only if an element is."""
    tensors, norm = list(tensors), 0.0
    # In float32 first, seven times as fast; where squares overflow there, in float64.
    for dtype in (None, torch.float64):
        if all(tensor.device.type == "cpu" for tensor in tensors):
            norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]
        else:  # a kernel for all; on a CPU it takes longer to get ready than small tensors do
            norms = [get_total_norm([tensor.to(dtype or tensor.dtype) for tensor in tensors])]
        norm = math.hypot(*torch.stack(norms).tolist()) if norms else 0.0  # read at once: on a GPU reading is a wait
        if math.isfinite(norm):
            break
    return norm


def find_strategy(settings: Mapping[str, Any]) -> tuple[type[FederatedStrategy], Any]:
    """Return the strategy class and config dataclass of ``strategy=NAME``.

    From ``strategies/NAME.py``, or from the file that ``strategy.server`` names where the method leaves the rule open.
    """
    if settings.get("server") is not None:
        module = registry.find("strategies", "strategy/server", {"name": settings["server"]})
    else:
        module = registry.find("strategies", "strategy", settings)
    return registry.only_subclass(module, FederatedStrategy), module.Config


def make_config(settings: Mapping[str, Any]) -> Any:
    """Check the whole ``strategy`` group and return the server half's config.

    Its keys are those of the node half and of the server half together; anything else is an error.
    """
    _, client_config = find_client(settings)
    _, server_config = find_strategy(settings)
    client_fields, server_fields = set(client_config.__dataclass_fields__), set(server_config.__dataclass_fields__)
    ignore = registry.COMMON_KEYS | {"server"}
    build(client_config, settings, "strategy", ignore=ignore | server_fields)
    return build(server_config, settings, "strategy", ignore=ignore | client_fields)
