"""Nodes that Flower knows: asking which partition each holds, and a Grid for devices, which come and go."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import numpy as np
from flwr.app import ConfigRecord, Error, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from core import codec
from core.errors import UserError
from partitions.federation import Federation
from partitions.partition import Partition
from strategies.base import Population

# Seconds between two looks at Flower's inbox, and at its list of nodes.
POLL = 1.0


class Nodes(Protocol):
    """What asking nodes takes of a Grid."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are there."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies."""


class DeviceGrid:
    """Flower's Grid of a deployment, in which a message that cannot be sent or read costs one reply and never the run.

    Flower's own ``send_and_receive`` ends with an exception for either. ``run_id`` is the run's name on the nodes' disks.
    """

    def __init__(self, grid: Grid, run_id: int) -> None:
        self.grid, self.run_id = grid, str(run_id)
        self.limit = self.left = sys.maxsize  # bytes of a reply, and of the one that is coming in

    def limit_replies(self, size: int) -> None:
        """Stop fetching a reply at ``size`` bytes: a node may send any number, and Flower would hold four times as many."""
        client: Any = getattr(self.grid, "_runtime_client", None)  # Flower's Grid has no other way to look at what comes
        if client is None:
            raise UserError("this version of Flower fetches replies in another way, so that their size cannot be limited")
        self.limit, pull = size, client.PullObject

        def limited(request: Any) -> Any:
            response = pull(request)
            self.left -= len(response.object_content)
            if self.left < 0:
                raise ValueError(f"it has more than {size} bytes")
            return response

        client.PullObject = limited

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online."""
        return self.grid.get_node_ids()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies, up to ``timeout`` seconds.

        A node that goes offline answers with an error after Flower's patience of about a minute. What is not delivered
        within ``timeout`` never is, so that a node that returns does not begin with rounds long past.
        """
        messages = list(messages)
        if timeout is not None:
            for message in messages:
                message.metadata.ttl = timeout
        ends = None if timeout is None else time.monotonic() + timeout
        pushed = self.grid.push_messages(messages) if messages else []
        waiting = {taken: message for taken, message in zip(pushed, messages, strict=False) if taken is not None}
        replies: list[Message] = [
            _failed(message, "Flower did not take the message: the node is not registered, or the message too large")
            for message in messages
            if message.metadata.message_id not in waiting
        ]
        while waiting and (ends is None or time.monotonic() < ends):
            for identifier, message in list(waiting.items()):
                self.left = self.limit
                try:
                    # One at a time: a reply that cannot be read takes with it what is pulled together with it.
                    found = list(self.grid.pull_messages([identifier]))
                except httpx.HTTPError:
                    raise
                except Exception as error:
                    found = [_failed(message, f"its reply cannot be read ({type(error).__name__}: {error})")]
                if found:
                    replies += found
                    del waiting[identifier]
            if waiting:
                time.sleep(POLL)
        return replies


def _failed(message: Message, reason: str) -> Message:
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


@dataclass
class Roll:
    """Who the nodes of a run are."""

    population: Population
    federation: Federation  # as the server sees it: of nodes with data of their own it holds nothing
    class_counts: np.ndarray  # (K, C) training examples
    num_test: np.ndarray | None  # (K,) examples in the nodes' own test parts; None: the federation knows
    own_data: bool = False  # whether any node brought data of its own

    def has_test(self, node: int) -> bool:
        """Return whether a node has a test part of its own."""
        return bool(len(self.federation.partition.test(node)) if self.num_test is None else self.num_test[node])

    def class_proportions(self) -> np.ndarray:
        """Return each node's class proportions (K, C), rows summing to 1; zeros for an empty node."""
        if not self.own_data:
            return self.federation.partition.class_proportions()
        return self.class_counts / np.maximum(self.class_counts.sum(1, keepdims=True), 1)


@dataclass
class _Answer:
    """What a node said to a query; raises ``UserError`` for what no node of this run can say."""

    node_id: int
    partition: int
    class_counts: np.ndarray
    num_test: int
    own_data: bool
    classes: list[str] = field(default_factory=list)

    @staticmethod
    def read(node_id: int, content: RecordDict, num_nodes: int, num_classes: int) -> "_Answer":
        """Return the answer in ``content``, checked."""
        metrics, about = content.get(codec.METRICS, MetricRecord()), content.get(codec.CONFIG, ConfigRecord())
        assert isinstance(metrics, MetricRecord)
        assert isinstance(about, ConfigRecord)
        if "refused" in about:
            raise UserError(f"node {node_id} cannot take part: {about['refused']!s}")
        values: dict[str, Any] = dict(metrics)
        try:
            partition, counts = int(values["partition-id"]), np.array(values["class-counts"], dtype=np.int64)
            answer = _Answer(node_id, partition, counts, int(values["num-test-examples"]), bool(about["own-data"]))
            answer.classes = [str(name) for name in about["classes"]]  # type: ignore[union-attr]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"node {node_id} gave no answer that can be read; is it of another version?") from error
        if not 0 <= partition < num_nodes:
            raise UserError(f"node {node_id} says partition-id={partition}, which is not in 0..{num_nodes - 1}")
        if counts.shape != (num_classes,) or counts.min() < 0 or answer.num_test < 0:
            raise UserError(f"node {node_id} (partition {partition}) has counts of {len(counts)} classes, not {num_classes}")
        return answer


class Register:
    """Finds the nodes of a run by a query message, since Flower's ids are random, and finds them again under other ids."""

    def __init__(self, grid: Nodes, federation: Federation, settings: str, **asked: str) -> None:
        """``settings`` is the JSON that nodes receive, ``asked`` what else the query should say."""
        self.grid, self.federation = grid, federation
        self.content = RecordDict({codec.CONFIG: ConfigRecord({"settings": settings, **asked})})
        self.answers: dict[int, _Answer] = {}  # by partition
        self.known: set[int] = set()  # node ids that need not be asked
        self.population = Population(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=object))

    def call(self) -> Roll:
        """Wait until a node is there for every partition. Raises ``UserError`` for the first that cannot take part."""
        wanted, shown = self.federation.num_nodes, -1
        while len(self.answers) < wanted:
            online = set(self.grid.get_node_ids())
            for answer in self._ask(sorted(online - self.known)):
                self._enter(answer, online)
            if len(self.answers) < wanted:
                if len(self.answers) != shown:
                    shown = len(self.answers)
                    print(f"waiting for nodes: {shown} of {wanted} are here", flush=True)
                time.sleep(POLL)
        return self._roll()

    def again(self) -> list[str]:
        """Ask nodes that are new: one without a key comes back under another id. Returns a line on each.

        A node that cannot take part, or that claims the partition of a node still online, stays out.
        """
        online, lines = set(self.grid.get_node_ids()), []
        for node_id in sorted(online - self.known):
            try:
                for answer in self._ask([node_id]):
                    k, before = answer.partition, self.answers[answer.partition]
                    if before.node_id in online:
                        self.known.discard(node_id)  # Flower takes a minute to notice that a node is gone
                    elif (answer.class_counts != before.class_counts).any() or answer.num_test != before.num_test:
                        raise UserError(f"node {node_id} (partition {k}) holds other examples than the node it stands in for")
                    else:
                        self.answers[k], self.population.node_ids[k] = answer, node_id
                        lines.append(f"partition {k} is back as node {node_id}")
            except UserError as error:
                lines.append(str(error))
        return lines

    def _ask(self, ids: list[int]) -> Iterable[_Answer]:
        if not ids:
            return []
        self.known |= set(ids)
        messages = [Message(self.content, node_id, MessageType.QUERY) for node_id in ids]
        replies = list(self.grid.send_and_receive(messages))
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        answers = []
        for reply in replies:
            node_id = asked[reply.metadata.reply_to_message_id]
            if not reply.has_error():
                classes = self.federation.data.num_classes
                answers.append(_Answer.read(node_id, reply.content, self.federation.num_nodes, classes))
            elif reply.error.code == ErrorCode.NODE_UNAVAILABLE:
                self.known.discard(node_id)  # it is asked once it is back
            else:
                raise UserError(f"node {node_id} could not be asked for its partition: {reply.error.reason}")
        return answers

    def _enter(self, answer: _Answer, online: set[int]) -> None:
        k, other = answer.partition, self.answers.get(answer.partition)
        if other is not None and other.node_id in online:
            raise UserError(f"nodes {other.node_id} and {answer.node_id} both say partition-id={k}; every node has its own")
        who = f"node {answer.node_id} (partition {k})"
        if not answer.own_data and (answer.class_counts != self.federation.partition.class_counts()[k]).any():
            raise UserError(f"{who} holds other examples than the partition deals to it: its data set is not the server's")
        for earlier in self.answers.values():
            if answer.classes and earlier.classes and answer.classes != earlier.classes:
                raise UserError(f"{who} has classes {answer.classes}, node {earlier.node_id} has {earlier.classes}")
        self.answers[k] = answer

    def _roll(self) -> Roll:
        rows = [self.answers[k] for k in range(self.federation.num_nodes)]
        counts = np.stack([row.class_counts for row in rows])
        self.population = Population(counts.sum(1), np.array([row.node_id for row in rows], dtype=object))
        federation, own_data = self.federation, any(row.own_data for row in rows)
        if own_data:
            data, dealt = federation.data, federation.partition
            nothing = np.zeros(0, dtype=np.int64)
            parts = [[nothing if row.own_data else part(k) for k, row in enumerate(rows)] for part in (dealt.train, dealt.test)]
            federation = Federation(data, Partition(parts[0], parts[1], data.y.numpy(), data.num_classes))
        return Roll(self.population, federation, counts, np.array([row.num_test for row in rows]), own_data)
