"""Simulate attacks: choose the attackers, and replace parts of their replies in a Grid between clients and server.

Devices have no such code. An attack exists only in simulation, and clients know nothing of it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from flwr.app import Message, MessageType, RecordDict

from contrafed.core import codec, registry
from contrafed.core.client_run import Choice, ClientRun
from contrafed.core.errors import UserError
from contrafed.core.randomness import draw_attackers
from contrafed.core.schema import OnlyWith, Range
from contrafed.core.tensors import Tensors
from contrafed.data.federation import Federation
from contrafed.engines.client_registry import Members
from contrafed.engines.grid import RunGrid

# Tensors that attackers replace: their model or update, and their prototypes. Counts, statistics and reports stay as they are.
MODEL, ATTACKED = "model/", ("model/", "delta/", "proto/mean")
PROTOTYPES, HELD = "proto/mean", "proto/count"


@dataclass(frozen=True)
class Attackers:
    """Settings that the ``Config`` of every attack inherits: which clients attack."""

    # Whether attackers train on wrong labels (``contrafed/data/label_flip.py``). Such an attack replaces no reply.
    flips_labels: ClassVar[bool] = False

    fraction: Annotated[float, Range(ge=0, le=1), OnlyWith("clients", None)]
    clients: tuple[int, ...] | None

    def among(self, num_trained: int, seed: int) -> tuple[int, ...]:
        """Return the attackers among the clients that may train, ascending. Raises ``UserError`` for one that is none."""
        if self.clients is None:
            found = draw_attackers(self.fraction, num_trained, seed)
            if self.fraction and not found:
                raise UserError(f"attack.fraction={self.fraction:g} of {num_trained} clients makes no attacker")
            return found
        if not self.clients:
            raise UserError("attack.clients: the list is empty. Fix: attack=none, or null for attack.fraction of all clients")
        if wrong := [client for client in self.clients if not 0 <= client < num_trained]:
            raise UserError(f"attack.clients: client {wrong[0]} is not in 0..{num_trained - 1}, the clients that may train")
        return tuple(sorted(set(self.clients)))

    @property
    def needs_honest(self) -> bool:
        """Return whether attackers use the updates of honest clients."""
        return False


class Attack:
    """Replaces the updates of attackers: tensors by name, a model minus the received one, and prototypes."""

    def __init__(self, config: Any, seed: int) -> None:
        self.config, self.seed = config, seed

    def replace(self, own: Mapping[int, Tensors], honest: Mapping[int, Tensors], server_round: int) -> dict[int, Tensors]:
        """Return each attacker's upload.

        Args:
            own: The attackers' updates, by client. A prototype of a class without examples is NaN.
            honest: The updates of all other clients, by client.
            server_round: The round.
        """
        return {client: self.one(change, server_round, client) for client, change in own.items()}

    def one(self, change: Tensors, server_round: int, client: int) -> Tensors:
        """Return the upload of an attacker that uses only its own update."""
        raise NotImplementedError


class AttackedGrid:
    """A Grid with attackers among its clients. Otherwise it behaves like the Grid that it wraps."""

    divides_rounds = False  # attackers may read all honest updates of a round

    def __init__(self, grid: RunGrid, attack: Attack, attackers: Iterable[int]) -> None:
        self._grid, self._attack, self._attackers = grid, attack, frozenset(attackers)
        self._partition_of: dict[int, int] = {}  # by Flower's node id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def members(self, run: ClientRun, federation: Federation, places: Mapping[str, str]) -> Members:
        """Return the run's clients, and store their partition ids."""
        found = self._grid.members(run, federation, places)
        self._partition_of = {int(client): k for k, client in enumerate(found.node_ids)}
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return their replies. Attackers' replies to training are replaced."""
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        asked = {message.metadata.message_id: message for message in sent}
        trained = {}
        for i, reply in enumerate(replies):
            message = asked.get(reply.metadata.reply_to_message_id)
            if message is not None and message.metadata.message_type == MessageType.TRAIN and reply.has_content():
                trained[i] = (self._partition_of[message.metadata.dst_node_id], message)
        own = {i for i, (client, _) in trained.items() if client in self._attackers}
        if own:
            server_round = int(codec.config_of(sent[0])["server-round"])
            changes = {client: change_of(message, replies[i]) for i, (client, message) in trained.items()}
            attacking = {trained[i][0]: changes[trained[i][0]] for i in own}
            honest = {client: change for client, change in sorted(changes.items()) if client not in attacking}
            made = self._attack.replace(dict(sorted(attacking.items())), honest, server_round)
            for i in own:
                client, message = trained[i]
                replies[i] = with_change(message, replies[i], made[client])
        return replies


def wrap_in_attack(grid: RunGrid, choice: Choice, num_trained: int, seed: int) -> RunGrid:
    """Return the Grid with the chosen attack, or the Grid itself if updates stay unchanged."""
    if not registry.own_subclasses(choice.module, Attack):
        return grid
    attack = registry.only_subclass(choice.module, Attack)(choice.config, seed)
    return cast(RunGrid, AttackedGrid(grid, attack, choice.config.among(num_trained, seed)))


def change_of(message: Message, reply: Message) -> Tensors:
    """Return the part of a reply that an attack may replace, minus the received model. Prototypes of absent classes are NaN."""
    received, sent = (codec.state_of(m.content, codec.ARRAYS) for m in (message, reply))
    change = {}
    for name, tensor in sent.items():
        if name.startswith(MODEL):
            change[name] = tensor - received[name].to(tensor)
        elif name == PROTOTYPES:
            change[name] = torch.where(sent[HELD].unsqueeze(1) > 0, tensor, torch.nan)
        elif name.startswith(ATTACKED):
            change[name] = tensor
    return change


def with_change(message: Message, reply: Message, change: Tensors) -> Message:
    """Return a reply with ``change`` in place of the client's update. The client's own values stay where it is NaN."""
    received, sent = (codec.state_of(m.content, codec.ARRAYS) for m in (message, reply))
    for name, tensor in change.items():
        new = received[name].to(tensor) + tensor if name.startswith(MODEL) else tensor
        sent[name] = torch.where(new.isnan(), sent[name], new.to(sent[name]))
    content = RecordDict({**reply.content, codec.ARRAYS: codec.to_record(sent)})
    return Message(content=content, metadata=reply.metadata)  # type: ignore[call-overload, no-any-return]


def moments(changes: Iterable[Tensors]) -> tuple[Tensors, Tensors]:
    """Compute mean and standard deviation over clients of every number, in float64.

    The standard deviation divides by the number of values. NaN is ignored, and is the result if all are NaN.

    Raises:
        ValueError: Without changes.
    """
    found = list(changes)
    if not found:
        raise ValueError("no changes to average")
    mean, spread = Tensors(), Tensors()
    for name in found[0]:
        rows = torch.stack([change[name].double() for change in found])
        mean[name] = rows.nanmean(0)
        spread[name] = (rows - mean[name]).square().nanmean(0).sqrt()
    return mean, spread
