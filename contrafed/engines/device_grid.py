"""A Grid for devices, which connect and disconnect, and whose messages may be lost or unreadable."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from contrafed.core import codec
from contrafed.core.client_run import ClientRun
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config, read_summary
from contrafed.data.federation import Federation
from contrafed.data.own import facts_of
from contrafed.engines.client_registry import Members, Registry
from contrafed.engines.deadlines import MAX_REPLY_SECONDS, failed_reply, late_reply
from contrafed.engines.device_fetch import MAX_PAUSE_SECONDS, IncompleteReplyError, ReplyFetcher
from contrafed.engines.device_keys import demands_keys, read_keys
from contrafed.engines.superlink import SuperLink
from contrafed.training.workspace import Workspace

# Seconds between two queries of Flower's inbox.
POLL_SECONDS = 1.0
LAST_SECONDS = 0.2  # between the last look for replies and the end of their time


class DeviceGrid:
    """Flower's Grid of a deployment. A message that cannot be sent or read costs one reply and never ends the run.

    Flower's own ``send_and_receive`` raises an exception for either. Clients keep their state on their own disks, under the id
    of the run's first attempt. Every message tells them where the run stands (``contrafed.client_app.files.Moment``).
    """

    every_failure = True

    def __init__(self, grid: Grid, run_id: int, patience: float | None = None) -> None:
        """Wrap ``grid``. ``patience``: seconds that the run waits for a client of every partition, None for ever."""
        self.grid, self.run_id, self.patience = grid, str(run_id), patience
        self.superlink = SuperLink(grid)
        client: Any = getattr(grid, "_runtime_client", None)  # Flower's Grid has no other way to inspect incoming bytes
        self.fetcher = None if client is None else ReplyFetcher(client)
        self.registry: Registry | None = None
        self.run, self.past = self.run_id, list[str]()
        self.checkpoint: int | None = None
        self.before: list[list[Any]] = []  # answers of clients in the earlier attempt
        self.known: dict[int, int] = {}  # by partition, the last round after which a client reported client state

    def begin(self, checkpoints: bool, own: Mapping[str, Any]) -> None:
        """Begin a run or resume it from a checkpoint, which later messages then contain."""
        self.run, self.past = own.get("run", self.run_id), list(own.get("past", []))
        self.known, self.before = dict(own.get("known", [])), own.get("clients", [])
        self.checkpoint = int(own.get("round", 0)) if checkpoints else None

    def limit_replies(self, size: int) -> None:
        """Stop fetching a reply at ``size`` bytes."""
        if self.fetcher is None:
            raise UserError("this version of Flower fetches replies in another way, so that their size cannot be limited")
        self.fetcher.limit = size

    def members(self, run: ClientRun, federation: Federation, places: Mapping[str, str]) -> Members:
        """Ask every device for its partition, and tell it which images the run's model takes."""
        settings = replace(run, images=facts_of(federation.data)).to_json()
        has_keys = self.superlink.ask(lambda: demands_keys(self.grid), math.inf, False)
        keys = self.get_keys if has_keys else None
        self.registry = Registry(self, federation, settings, places, self.patience, self.before, keys)
        return self.registry.wait()

    def newcomers(self) -> list[str]:
        """Register devices that connected since the last round. Returns a line about each."""
        return self.registry.newcomers() if self.registry is not None else []

    def save_place(self, folder: Path) -> str:
        """Return the run's id, because devices have their own folders."""
        return self.run_id

    def load_place(self, folder: Path, workspace: Workspace) -> str:
        """Return the id of the run of devices in ``folder``. Raises ``UserError`` if it was none, or if it saved no models."""
        run = str((read_summary(folder) or {}).get("run_id", ""))
        if not run:
            raise UserError(
                f"evaluate_only: {folder} has no summary.json of a run of devices, which keep their personal models themselves"
            )
        if not read_config(folder).get("save_personal"):
            raise UserError(f"evaluate_only: the clients of {folder} kept no personal models; the run needs save_personal=true")
        return run

    def memory_cost(self) -> None:
        """Return nothing, because devices do not report it."""

    def take_changed(self) -> dict[int, dict[str, Tensor]]:
        """Return nothing, because devices keep their client state, also that of the last checkpoint."""
        return {}

    def restore(self, client_states: Iterable[tuple[int, dict[str, Tensor]]], *, changed: bool) -> None:
        """Do nothing, because devices restore their state themselves."""

    def own(self, server_round: int) -> dict[str, Any]:
        """Return the run's name in files, its attempts with their last rounds, and what is known of its clients."""
        past, known = [*self.past, f"{self.run_id}@{server_round}"], [list(pair) for pair in self.known.items()]
        clients = [] if self.registry is None else self.registry.export_answers()
        return {"run": self.run, "round": server_round, "past": past, "known": known, "clients": clients}

    def on_checkpoint(self, server_round: int, on_disk: Callable[[], None]) -> None:
        """Wait for the checkpoint. From the next message on, clients may delete their state of the previous one."""
        on_disk()
        self.checkpoint = server_round

    def about(self) -> dict[str, str]:
        """Return the engine's name, and the id of this attempt, by which devices find their personal models."""
        return {"engine": "devices", "run_id": self.run_id}

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the connected clients."""
        return self.superlink.ask(lambda: list(self.grid.get_node_ids()), math.inf, [])

    def get_names(self) -> Mapping[int, str]:
        """Return the names that the operator gave to connected clients (``flwr supernode register --name``), by node id."""
        get_nodes = getattr(self.grid, "get_nodes", list)
        nodes: list[Any] = self.superlink.ask(lambda: list(get_nodes()), math.inf, [])
        return {node.node_id: node.name for node in nodes if node.name}

    def get_keys(self) -> Mapping[int, str]:
        """Return the SHA-256 of connected clients' keys by node id."""
        return self.superlink.ask(lambda: read_keys(self.grid), math.inf, dict[int, str]())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages and wait for their replies, up to ``timeout`` seconds.

        A client that disconnects answers with an error after Flower's limit of about a minute. A message that is not delivered
        within ``timeout`` is dropped, so that a returning client does not start with old rounds. Without ``timeout`` a reply
        fails if it is missing after ``MAX_REPLY_SECONDS``. Flower's nightly only logs a reply that it lost. Until then a
        SuperLink that does not answer is asked again. Raises ``RunStopped`` if it is silent for too long.
        """
        messages, ends = list(messages), time.monotonic() + (MAX_REPLY_SECONDS if timeout is None else timeout)
        waiting, replies = self._push(messages, timeout, ends)
        replies += self.receive(waiting, ends)
        if self.fetcher is not None:
            self.fetcher.clear()
        if timeout is None:
            replies += map(late_reply, waiting.values())
        return replies

    def send(self, messages: Iterable[Message], timeout: float) -> tuple[dict[str, Message], list[Message]]:
        """Send messages that may be answered for ``timeout`` seconds.

        Returns:
            The messages that Flower took, by id, and failed replies to the others.
        """
        return self._push(list(messages), timeout, time.monotonic() + timeout)

    def receive(self, waiting: dict[str, Message], ends: float) -> list[Message]:
        """Wait for the replies to messages that ``send`` returned, and remove those that have one from ``waiting``.

        Args:
            waiting: Messages by id.
            ends: A time of ``time.monotonic``.
        """
        replies, partitions = list[Message](), self._partitions()
        while waiting and time.monotonic() < ends:
            for identifier, message in list(waiting.items()):
                if found := self.superlink.ask(partial(self._pull, identifier, message), ends, list[Message]()):
                    self._hear(message, found[0], partitions)
                    replies += found
                    del waiting[identifier]
            if waiting:  # the last look is shortly before the end, because Flower drops messages then
                left = ends - time.monotonic()
                time.sleep(min(POLL_SECONDS, max(left - LAST_SECONDS, LAST_SECONDS)))
        return replies

    def _push(self, messages: list[Message], timeout: float | None, ends: float) -> tuple[dict[str, Message], list[Message]]:
        partitions = self._partitions()
        for message in messages:
            self._stamp(message, partitions.get(message.metadata.dst_node_id))
            if timeout is not None:
                message.metadata.ttl = timeout
        # A message that is sent twice arrives once, because Flower names it by its content.
        pushed = self.superlink.ask(lambda: list(self.grid.push_messages(messages)), ends, None) if messages else []
        if pushed is None:
            return {}, []
        waiting = {taken: message for taken, message in zip(pushed, messages, strict=False) if taken}
        return waiting, [
            failed_reply(message, "Flower did not take the message: the client is not registered, or the message too large")
            for message in messages
            if message.metadata.message_id not in waiting
        ]

    def _pull(self, identifier: str, message: Message) -> list[Message]:
        """Return the reply to ``message`` if it is there. One that cannot be read is a failed one."""
        if self.fetcher is not None:
            self.fetcher.open(identifier)
        try:
            # One at a time, because an unreadable reply makes all replies of the same call fail.
            found = list(self.grid.pull_messages([identifier]))
        except httpx.HTTPError:
            raise
        except IncompleteReplyError:
            if self.fetcher is None or not self.fetcher.has_stopped(identifier):
                return []
            found = [failed_reply(message, f"its upload stopped {MAX_PAUSE_SECONDS:g} s ago")]
        except Exception as error:
            found = [failed_reply(message, f"its reply cannot be read ({type(error).__name__}: {error})")]
        if found and self.fetcher is not None:
            self.fetcher.close(identifier)
        return found

    def _partitions(self) -> dict[int, int]:
        answers = {} if self.registry is None else self.registry.answers
        return {answer.node_id: partition for partition, answer in answers.items()}

    def _stamp(self, message: Message, partition: int | None) -> None:
        """Add to a message where the run stands, its partition, and what is known of its client."""
        config: dict[str, Any] = codec.config_of(message) | ({} if partition is None else {"partition": partition})
        config |= {"run": self.run, "past": self.past, "known": 0 if partition is None else self.known.get(partition, 0)}
        config |= {} if self.checkpoint is None else {"checkpoint": self.checkpoint}
        message.content[codec.CONFIG] = ConfigRecord(config)

    def _hear(self, message: Message, reply: Message, partitions: Mapping[int, int]) -> None:
        """Record whether a client that trained has client state now."""
        client, about = message.metadata.dst_node_id, {} if reply.has_error() else codec.config_of(reply)
        if message.metadata.message_type == MessageType.TRAIN and about.get("has-state") is True and client in partitions:
            self.known[partitions[client]] = int(message.metadata.group_id)
