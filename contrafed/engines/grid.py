"""Define what a run needs of its Grid, and the Grids of virtual clients. Client k has the id 1000 + k and is always
connected.
"""

import itertools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from flwr.app import Message, RecordDict
from flwr.app.metadata import validate_message_type
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from torch import Tensor

from contrafed.core.client_run import ClientRun
from contrafed.data.federation import Federation
from contrafed.engines.client_registry import Members
from contrafed.engines.client_state import ClientStateStore, Cost
from contrafed.engines.personal_models import check_saved, place_in
from contrafed.engines.worker import FIRST_NODE_ID, RUN_ID, BatchRunner, identify
from contrafed.training.workspace import Workspace


class RunGrid(Protocol):
    """The interface of a run's Grid: one of Contrafed's, or a wrapper of one of Flower's."""

    every_failure: bool  # whether every round reports its rejected replies, not only the first such round

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected clients."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and return the replies that arrived within ``timeout`` seconds."""

    def begin(self, checkpoints: bool, own: Mapping[str, Any]) -> None:
        """Begin a run. Called first.

        Args:
            checkpoints: Whether the run writes checkpoints.
            own: The result of ``own`` in the checkpoint to resume from, or empty.
        """

    def members(self, run: ClientRun, federation: Federation, places: Mapping[str, str]) -> Members:
        """Return the run's clients. ``places`` are the entries ``save`` and ``load`` of messages. Raises ``UserError``."""

    def newcomers(self) -> list[str]:
        """Register clients that connected since the last round. Returns a line about each."""

    def limit_replies(self, size: int) -> None:
        """Fetch no reply of more than ``size`` bytes."""

    def save_place(self, folder: Path) -> str:
        """Return the place of personal models that clients are told, for the run in ``folder``."""

    def load_place(self, folder: Path, workspace: Workspace) -> str:
        """Return the place of the saved models of the run in ``folder``. Raises ``UserError`` if it saved none."""

    def memory_cost(self) -> Cost | None:
        """Return the cost of client state since the last call, None if the grid does not know it."""

    def take_changed(self) -> dict[int, dict[str, Tensor]]:
        """Return, by partition id, the client states that changed since the last call."""

    def restore(self, client_states: Iterable[tuple[int, dict[str, Tensor]]], *, changed: bool) -> None:
        """Set client states, by partition id. With ``changed`` the next ``take_changed`` returns them again."""

    def own(self, server_round: int) -> dict[str, Any]:
        """Return what the grid itself needs to resume from a checkpoint of this round, in JSON types."""

    def on_checkpoint(self, server_round: int, on_disk: Callable[[], None]) -> None:
        """Handle a checkpoint that is being written. ``on_disk`` returns when it is on the disk."""

    def about(self) -> dict[str, str]:
        """Return the grid's entries of a run's summary."""


class SimulatedGrid:
    """The common part of all grids with simulated clients, which share this machine's disk and never change."""

    engine: str  # as a run's summary names it
    every_failure = False
    divides_rounds = True  # messages of a round may be sent in chunks

    def begin(self, checkpoints: bool, own: Mapping[str, Any]) -> None:
        """Do nothing."""

    def newcomers(self) -> list[str]:
        """Return no lines, because no client is new."""
        return []

    def own(self, server_round: int) -> dict[str, Any]:
        """Return nothing, because client state is in the checkpoint."""
        return {}

    def on_checkpoint(self, server_round: int, on_disk: Callable[[], None]) -> None:
        """Do nothing, because nothing waits for it."""

    def get_names(self) -> Mapping[int, str]:
        """Return no names, because simulated clients have none."""
        return {}

    def limit_replies(self, size: int) -> None:
        """Do nothing, because replies are Contrafed's own."""

    def save_place(self, folder: Path) -> str:
        """Return the folder of personal models in a run's folder."""
        return place_in(folder)

    def load_place(self, folder: Path, workspace: Workspace) -> str:
        """Return the folder if it has the model of every client. Raises ``UserError``."""
        check_saved(workspace, place_in(folder))
        return place_in(folder)

    def about(self) -> dict[str, str]:
        """Return the engine's name."""
        return {"engine": self.engine}


class VirtualGrid(SimulatedGrid, Grid):
    """The common part of Contrafed's engines: ids, validation, and replies in the order of the requests.

    ``push_messages`` queues messages, ``pull_messages`` runs the queue, and ``send_and_receive`` does both. Replies never
    raise. A failed client answers with an error, and a client that exceeds the time limit does not answer.
    """

    def __init__(self, num_clients: int) -> None:
        identify()
        self.num_clients = num_clients
        self._run = Run.create_empty(RUN_ID)
        self._count = itertools.count(1)
        self._queue: list[Message] = []
        self._replies: dict[str, Message] = {}

    @property
    def node_ids(self) -> np.ndarray:
        """Flower's node id of every partition (K,)."""
        return np.arange(FIRST_NODE_ID, FIRST_NODE_ID + self.num_clients)

    def members(self, run: ClientRun, federation: Federation, places: Mapping[str, str]) -> Members:
        """Return the run's clients, which need not be asked."""
        return Members(self.node_ids, federation, federation.partition.class_counts(), run.to_json())

    @abstractmethod
    def execute(self, messages: Sequence[Message], timeout: float | None) -> list[Message | None]:
        """Run ``messages`` and return their replies in the same order, None for those that exceeded the time limit."""

    def set_run(self, run: Run) -> None:
        """Set the run this grid belongs to."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid belongs to."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message. This is Flower's older way, and ``Message(...)`` is the newer one."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids, ascending."""
        return cast(list[int], self.node_ids.tolist())

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue messages and return their new ids. Raises ``ValueError`` for a malformed one."""
        ids = []
        for message in messages:
            self._check(message)
            identifier = f"{self._run.run_id}-{next(self._count)}"
            message.metadata.__dict__["_message_id"] = identifier
            self._queue.append(message)
            ids.append(identifier)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Run the queue, and return the existing replies to ``message_ids``, each once, in that order."""
        self._work(None)
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run ``messages`` and return their replies in request order, fewer if ``timeout`` (seconds) passed."""
        ids = list(self.push_messages(messages))
        self._work(timeout)
        return self.pull_messages(ids)

    def close(self) -> None:
        """Release the grid's resources."""

    def _work(self, timeout: float | None) -> None:
        queue, self._queue = self._queue, []
        if not queue:
            return
        for message, reply in zip(queue, self.execute(queue, timeout), strict=True):
            if reply is not None:
                self._replies[message.metadata.message_id] = reply

    def _check(self, message: Message) -> None:
        meta = message.metadata
        faults = {
            "it already has an id": meta.message_id != "",
            "it is a reply": meta.reply_to_message_id != "",
            "its time to live is not positive": meta.ttl <= 0,
            "it was already delivered": meta.delivered_at != "",
            "it is not from the server": meta.src_node_id != SUPERLINK_NODE_ID,
            f"there is no client {meta.dst_node_id}": not 0 <= meta.dst_node_id - FIRST_NODE_ID < self.num_clients,
            "it belongs to another run": meta.run_id != self._run.run_id,
            "it has no content": not message.has_content(),
            f"'{meta.message_type}' is no message type": not validate_message_type(meta.message_type),
        }
        for fault, present in faults.items():
            if present:
                raise ValueError(f"invalid message: {fault}")


class LocalGrid(VirtualGrid):
    """The grid in this process: no Ray, one client or one stack after another."""

    engine = "local"

    def __init__(self, num_clients: int, stack_size: int, client_states: ClientStateStore | None = None) -> None:
        super().__init__(num_clients)
        self.runner = BatchRunner(num_clients, stack_size)
        self.client_states = client_states or ClientStateStore(0, sys.maxsize, None)  # only of clients that have a state
        self.changed: set[int] = set()

    def execute(self, messages: Sequence[Message], timeout: float | None) -> list[Message | None]:
        """Run the messages here. A client's state is committed only if its training succeeded."""
        clients = [message.metadata.dst_node_id for message in messages]

        def keep(i: int, state: dict[str, Tensor]) -> None:
            if state:
                self.client_states.store(clients[i], state)
                self.changed.add(clients[i])

        return self.runner.run(messages, lambda i: self.client_states.get(clients[i]), keep, timeout)

    def take_changed(self) -> dict[int, dict[str, Tensor]]:
        """Return the client states that changed since the last call."""
        changed, self.changed = sorted(self.changed), set()
        return {client - FIRST_NODE_ID: self.client_states.get(client) for client in changed}

    def restore(self, client_states: Iterable[tuple[int, dict[str, Tensor]]], *, changed: bool) -> None:
        """Set client states."""
        for client, tensors in client_states:
            self.client_states.store(FIRST_NODE_ID + client, tensors)
            self.changed |= {FIRST_NODE_ID + client} if changed else set()

    def memory_cost(self) -> Cost:
        """Return the cost of client state since the last call."""
        return self.client_states.cost()

    def close(self) -> None:
        """Delete the client states."""
        self.client_states.clear()
