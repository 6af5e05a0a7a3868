"""Register the clients of a run. Flower's ids are random, so its clients are asked which partition each has."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from contrafed.core import codec
from contrafed.core.errors import UserError
from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.engines.client_answer import Answer, describe
from contrafed.engines.deadlines import MAX_QUERY_SECONDS
from contrafed.engines.device_keys import KeyTable

# Seconds between two queries of Flower's list of clients.
POLL_SECONDS = 1.0
# Largest number of missing partitions in a message.
MAX_NAMED_PARTITIONS = 20
MAX_NAME_CHARACTERS = 60  # of a client's name, where it is shown
# Seconds to wait for answers of clients that connect during a run.
NEWCOMER_SECONDS = 60.0
# Seconds to wait for answers before round 1 until clients that have connected meanwhile are asked too.
LOOK_SECONDS = 5.0


@dataclass
class Members:
    """The clients of a run. A client's row in these arrays is its partition id."""

    node_ids: np.ndarray  # (K,) Flower's node ids, updated when a client returns under another id
    federation: Federation  # as on the server, without the data that only clients have
    class_counts: np.ndarray  # (K, C) training examples
    settings: str  # the JSON that is part of every message to them
    num_test: np.ndarray | None = None  # (K,) examples in each client's test part, None if the federation has them
    own_data: bool = False  # whether any client has its own data
    names: Mapping[int, str] = field(default_factory=dict)  # the names that operators gave to clients, by partition
    num_validation: np.ndarray | None = None  # (K,) examples in each client's validation part, None if the federation has them

    @property
    def sizes(self) -> np.ndarray:
        """Training examples by client (K,)."""
        return self.class_counts.sum(1)  # type: ignore[no-any-return]

    @property
    def test_sizes(self) -> np.ndarray:
        """Examples in each client's own test part (K,)."""
        return self.federation.partition.test_sizes if self.num_test is None else self.num_test

    @property
    def validation_sizes(self) -> np.ndarray:
        """Examples in each client's own validation part (K,)."""
        return self.federation.partition.validation_sizes if self.num_validation is None else self.num_validation

    def class_proportions(self) -> np.ndarray:
        """Return each client's class proportions (K, C). Rows sum to 1, or are zeros for an empty client."""
        if not self.own_data:
            return self.federation.partition.class_proportions()
        return self.class_counts / np.maximum(self.class_counts.sum(1, keepdims=True), 1)


class Asked(Protocol):
    """The part of a Grid that queries need."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected clients."""

    def get_names(self) -> Mapping[int, str]:
        """Return the names of the connected clients by node id, without those that have none."""

    def send(self, messages: Iterable[Message], timeout: float) -> tuple[dict[str, Message], list[Message]]:
        """Send messages that may be answered for ``timeout`` seconds. Returns them by id, and failed replies to others."""

    def receive(self, waiting: dict[str, Message], ends: float) -> list[Message]:
        """Wait for replies until ``ends`` of ``time.monotonic``. Remove the messages that have one from ``waiting``."""


class Registry:
    """The clients that answered, by partition. Each is asked once, and again if it returns under another id."""

    def __init__(
        self,
        grid: Asked,
        federation: Federation,
        settings: str,
        places: Mapping[str, str],
        patience: float | None = None,
        before: Iterable[list[Any]] = (),
        read_keys: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        """Prepare the queries.

        Args:
            grid: The Grid.
            federation: The data on the server.
            settings: The JSON that clients receive.
            places: The entries ``save`` and ``load`` of the queries.
            patience: Seconds to wait for clients, None for ever.
            before: Answers of an earlier attempt (``export_answers``). Clients that do not return in time are away.
            read_keys: Returns the keys by node id, which are then bound to partitions. None if clients have no lasting keys.
        """
        self.before = {answer.partition: answer for answer in map(Answer.away, before)}
        bound = {partition: answer.key for partition, answer in self.before.items() if answer.key}
        self.keys = None if read_keys is None else KeyTable(read_keys, bound)
        self.grid, self.federation, self.settings, self.patience = grid, federation, settings, patience
        partition = json.loads(settings)["partition"] if settings else {}
        self.max_examples = int(partition.get("max_examples", 0)) if partition.get("name") == "own" else 0  # of own data
        self.content = RecordDict({codec.CONFIG: ConfigRecord({"settings": settings, **places})})
        self.answers: dict[int, Answer] = {}  # by partition
        self.names: dict[int, str] = {}  # by partition
        self.node_names: dict[int, str] = {}  # by node id
        self.node_keys: dict[int, str] = {}  # by node id
        self.known: set[int] = set()  # node ids that need not be asked
        self.asked: dict[str, tuple[int, float]] = {}  # by message id, the node id of an open query and the end of its time
        self.waiting: dict[str, Message] = {}  # the open queries that Flower took
        self.waits: dict[int, tuple[int, int]] = {}  # for clients without a valid answer: the next query, and the waiting time
        self.looks = 0  # queries of newcomers
        self.node_ids = np.zeros(0, dtype=object)

    def wait(self) -> Members:
        """Wait for a client of every partition. Raises ``UserError`` for one that cannot participate or is missing."""
        wanted, shown = self.federation.num_clients, -1
        ends = None if self.patience is None else time.monotonic() + self.patience
        while len(self.answers) < wanted:
            online = set(self.grid.get_node_ids())
            left = MAX_QUERY_SECONDS if ends is None else max(ends - time.monotonic(), POLL_SECONDS)
            answers, errors = self._ask(sorted(online - self.known), left, min(left, LOOK_SECONDS))
            if errors:
                raise errors[0]
            for answer in answers:
                self._enter(answer, online)
            if len(self.answers) == wanted:
                break
            if ends is not None and time.monotonic() >= ends:
                self._go_on_without()
                break
            if len(self.answers) != shown:
                shown = len(self.answers)
                print(f"waiting for clients: {shown} of {wanted} are here", flush=True)
            if not self.waiting:
                time.sleep(POLL_SECONDS)
        self._end_queries(math.inf)
        return self._members()

    def export_answers(self) -> list[list[Any]]:
        """Return the clients' answers for a checkpoint."""
        return [answer.to_json() for answer in self.answers.values()]

    def newcomers(self) -> list[str]:
        """Ask new clients, because one without a key returns under another id. Returns a line about each.

        A client without a valid answer, or that claims the partition of a connected client, is asked again after one round,
        two, four, ... One that disconnected is asked when it is back.
        """
        self.looks += 1
        online = set(self.grid.get_node_ids())
        self.known &= online | {answer.node_id for answer in self.answers.values()}
        self.waits = {node_id: wait for node_id, wait in self.waits.items() if node_id in online}
        new = sorted(node_id for node_id in online - self.known if self.waits.get(node_id, (0, 0))[0] <= self.looks)
        seconds = min(self.patience or NEWCOMER_SECONDS, NEWCOMER_SECONDS)
        answers, errors = self._ask(new, seconds, seconds)
        lines = [str(error) for error in errors]
        for answer in answers:
            before = self.answers[answer.partition]
            try:
                self._bind(answer)
            except UserError as error:
                lines.append(str(error))
                self.known.discard(answer.node_id)
                continue
            if before.node_id in online:
                self.known.discard(answer.node_id)  # Flower takes a minute to notice that a client is gone
            elif answer.other_examples(before):
                lines.append(f"{self._describe(answer)} holds other examples than the client it stands in for")
            elif fault := self._find_fault(answer):
                lines.append(fault)
            else:
                lines += self._note_other(answer)
                self.answers[answer.partition], self.node_ids[answer.partition] = answer, answer.node_id
                self._note_name(answer)
                self.known.discard(before.node_id)  # if it returns it is asked, and may get its place again
                lines.append(f"{self._describe(answer)} is back, under another id")
        for node_id in set(new) - self.known:
            later = 2 * self.waits.get(node_id, (0, 0))[1] or 1
            self.waits[node_id] = self.looks + later, later
        return lines

    def _ask(self, ids: list[int], timeout: float, seconds: float) -> tuple[list[Answer], list[UserError]]:
        """Query clients, and wait for their answers and for those to open queries.

        Args:
            ids: Node ids of the clients.
            timeout: Seconds that they have to answer.
            seconds: Seconds to wait. Later answers come with the next call.

        Returns:
            The answers, and the errors of clients without a valid one.
        """
        answers, errors = list[Answer](), list[UserError]()
        replies = self._send(ids, timeout) if ids else []
        if self.waiting:
            replies += self.grid.receive(self.waiting, time.monotonic() + seconds)
        for reply in replies:
            node_id, _ = self.asked.pop(reply.metadata.reply_to_message_id, (None, 0.0))
            if node_id is None:
                continue
            name = self.node_names.get(node_id, "")
            if not reply.has_error():
                clients, classes = self.federation.num_clients, self.federation.data.num_classes
                try:
                    answers.append(Answer.read(node_id, reply.content, clients, classes, name))
                except UserError as error:
                    errors.append(error)
                    self.known.discard(node_id)  # the fault may pass
                else:
                    answers[-1].key = self.node_keys.get(node_id, "")
                continue
            self.known.discard(node_id)
            # The client is asked again once it is back, or if its query is no longer there.
            if reply.error.code not in (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE):
                said = codec.words(reply.error.reason)
                errors.append(UserError(f"{describe(node_id, None, name)} could not be asked for its partition: {said}"))
        self._end_queries(time.monotonic())
        return answers, errors

    def _send(self, ids: list[int], timeout: float) -> list[Message]:
        """Query clients. Returns failed replies to the queries that Flower did not take."""
        if self.keys is not None:
            self.node_keys |= self.keys.read()
            ids = [node_id for node_id in ids if node_id in self.node_keys]  # the others have just disconnected
        messages = [Message(self.content, node_id, MessageType.QUERY) for node_id in ids]
        self.node_names = {k: codec.words(v)[:MAX_NAME_CHARACTERS] for k, v in self.grid.get_names().items()}
        waiting, failed = self.grid.send(messages, timeout)
        self.waiting |= waiting
        sent = {*waiting, *(reply.metadata.reply_to_message_id for reply in failed)}
        for message in messages:
            if message.metadata.message_id in sent:
                self.known.add(message.metadata.dst_node_id)
                self.asked[message.metadata.message_id] = message.metadata.dst_node_id, time.monotonic() + timeout
        return failed

    def _end_queries(self, now: float) -> None:
        """Forget the queries whose time is over at ``now``. Their clients may be asked again."""
        for identifier in [identifier for identifier, (_, ends) in self.asked.items() if now >= ends]:
            self.known.discard(self.asked.pop(identifier)[0])
            self.waiting.pop(identifier, None)

    def _bind(self, answer: Answer) -> None:
        """Bind a client's key to its partition. Raises ``UserError`` if either has another."""
        if self.keys is not None:
            self.keys.bind(self._describe(answer), answer.key, answer.partition)

    def _enter(self, answer: Answer, online: set[int]) -> None:
        k, other = answer.partition, self.answers.get(answer.partition)
        if other is not None and other.node_id in online:
            both = " and ".join(self.node_names.get(each.node_id, str(each.node_id)) for each in (other, answer))
            raise UserError(f"clients {both} both say partition-id={k}; every client has its own")
        self._bind(answer)
        who = self._describe(answer)
        if fault := self._find_fault(answer):
            raise UserError(fault)
        for line in self._note_other(answer):
            print(line, flush=True)
        before = self.before.get(k)
        if before is not None and answer.other_examples(before):
            raise UserError(f"{who} holds other examples than when the run began: begin a new one")
        for earlier in self.answers.values():
            if answer.other_classes(earlier):
                raise UserError(f"{who} has classes {answer.classes}, {self._describe(earlier)} has {earlier.classes}")
        self.answers[k] = answer
        self._note_name(answer)

    def _find_fault(self, answer: Answer) -> str:
        """Return what is wrong with a client's examples, empty if nothing is."""
        who, most = self._describe(answer), max(answer.class_counts.sum(), answer.num_test, answer.num_validation)
        if not answer.own_data and self._holds_other(answer):
            return f"{who} holds other examples than the partition deals to it: its data set is not the server's"
        if answer.own_data and not self.max_examples:
            return f"partition: {who} has data of its own. Fix: partition=own, or no data in its --node-config"
        if answer.own_data and most > self.max_examples:
            return f"partition.max_examples={self.max_examples}: {who} says that it has {most}. Fix: raise it"
        return ""

    def _note_other(self, answer: Answer) -> list[str]:
        """Return a line if a client's examples are others than the server's, with equal counts."""
        other = answer.fingerprint not in ("", self.federation.data.fingerprint)
        said = f"{self._describe(answer)} reads other examples than the server, with the same number of each class"
        return [said] if other else []

    def _holds_other(self, answer: Answer) -> bool:
        """Return whether a client without ``data`` has other numbers of examples than the partition deals to it."""
        dealt, k = self.federation.partition, answer.partition
        held_out = (answer.num_test, answer.num_validation) != (dealt.test_sizes[k], dealt.validation_sizes[k])
        return bool(held_out or (answer.class_counts != dealt.class_counts()[k]).any())

    def _describe(self, answer: Answer) -> str:
        return describe(answer.node_id, answer.partition, self.node_names.get(answer.node_id, ""))

    def _note_name(self, answer: Answer) -> None:
        self.names.pop(answer.partition, None)
        if name := self.node_names.get(answer.node_id):
            self.names[answer.partition] = name

    def _go_on_without(self) -> None:
        """Treat clients of the earlier attempt as away. Raises ``UserError`` if a client is missing that never answered."""
        wanted, here = self.federation.num_clients, len(self.answers)
        missing = [k for k in range(wanted) if k not in self.answers]
        names = ", ".join(map(str, missing[:MAX_NAMED_PARTITIONS])) + (
            f" and {len(missing) - MAX_NAMED_PARTITIONS} more" if len(missing) > MAX_NAMED_PARTITIONS else ""
        )
        found = f"after {self.patience:g} s {here} of {wanted} clients are here; missing: partition {names}. "
        if not here or not self.before.keys() >= set(missing):
            raise UserError(f"{found}Start them, or set num_clients or wait_for_clients")
        self.answers |= {k: self.before[k] for k in missing}
        print(f"{found}They count as absent until they are back", flush=True)

    def _members(self) -> Members:
        rows = [self.answers[k] for k in range(self.federation.num_clients)]
        counts = np.stack([row.class_counts for row in rows])
        self.node_ids = np.array([row.node_id for row in rows], dtype=object)
        federation, own_data = self.federation, any(row.own_data for row in rows)
        if own_data:
            data, dealt = federation.data, federation.partition
            nothing = np.zeros(0, dtype=np.int64)
            every = (dealt.train, dealt.test, dealt.validation)
            parts = [[nothing if row.own_data else part(k) for k, row in enumerate(rows)] for part in every]
            federation = Federation(data, Partition(parts[0], parts[1], data.y.numpy(), data.num_classes, parts[2]))
        num_test, num_validation = (np.array([getattr(row, name) for row in rows]) for name in ("num_test", "num_validation"))
        return Members(self.node_ids, federation, counts, self.settings, num_test, own_data, self.names, num_validation)
