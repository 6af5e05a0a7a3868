"""Follow the simulated time of a run: how long a round lasts, who is late in it, and what becomes of late clients."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord

from contrafed.core.rounding import round_up
from contrafed.core.tensors import Tensors
from contrafed.data.clock import Clock
from contrafed.data.participation import Participation, read_deadline
from contrafed.server.replies import OTHER_PREFIX, Reply
from contrafed.server.round_log import Round


def weigh_by_staleness(staleness: int, a: float) -> float:
    """Return (1 + s)^-a, the weight of an update that s aggregations came before (FedAsync, section 5.2, polynomial)."""
    return float((1 + staleness) ** -a)


@dataclass(eq=False)
class LateUpdate:
    """A late client's local update between its deadline and its arrival."""

    arrives: float  # simulated seconds after the start of the run
    steps: int
    seconds: float  # simulated, from the download to the end of the upload
    reply: dict[str, Any] | None = None  # None if the client failed, or if its reply was rejected


class SimulatedTime:
    """The simulated time of a run. It follows from steps and bytes, so a round's plan is known before anyone trains.

    A round ends with its last reply, or at the deadline if a client is late. ``participation.late`` says what becomes of late
    clients:

    * drop: the server stops them at the deadline. They do not train here, and their client state stays as before.
    * stale: they train on. Their replies stay in ``busy`` until they arrive. Until then these clients are not available.
      The update of a reply that s rounds came before counts (1 + s)^-a times, with a = ``participation.staleness_a``.
    * partial: they take the steps that fit, upload at the deadline, and are dropped if no step fits.
    """

    def __init__(self, clock: Clock, strategy: Any, participation: Participation) -> None:
        """Begin at 0 seconds. Of the ``strategy`` it reads the sizes of messages, and which tensors are buffers."""
        self.clock, self.participation, self.buffers = clock, participation, strategy.buffers
        # Of one client in a round.
        self.bytes_down, self.bytes_up = count_bytes(strategy.broadcast_spec), count_bytes(strategy.upload_spec)
        self.late: str = participation.config.late
        self.now = 0.0  # the end of the last planned round
        self.busy: dict[int, LateUpdate] = {}  # by client

    def leave_out_busy(self, clients: np.ndarray) -> np.ndarray:
        """Return the clients that are not still at work for an earlier round."""
        return clients[~np.isin(clients, list(self.busy))] if self.busy else clients

    def plan(self, done: Round, costs: Mapping[int, int]) -> dict[int, int]:
        """Plan a round, and log its simulated seconds and each client's part of it.

        Args:
            done: The log of the round, with its cohort.
            costs: Each client's local steps, by partition id.

        Returns:
            The clients to ask, with the steps that each of them takes.
        """
        clients, t = done.participants, done.server_round
        steps = np.array([costs[client] for client in clients.tolist()], dtype=np.int64)
        seconds = self.clock.seconds(clients, t, steps, self.bytes_down, self.bytes_up)
        deadline = self._find_deadline(seconds)
        late = seconds > deadline
        taken, replies = steps, np.ones(len(clients), dtype=bool)
        if late.any() and self.late != "stale":
            # What a late client has done at the deadline, without and with time for its upload.
            made, fit = (self.clock.steps_within(deadline, clients, t, self.bytes_down, up) for up in (0, self.bytes_up))
            replies = ~late | ((self.late == "partial") & (fit > 0))
            taken = np.where(late, np.where(replies, fit, np.minimum(made, steps)), steps)
        lasts = self._find_length(seconds, deadline)
        start, self.now = self.now, self.now + lasts
        if self.late == "stale":
            work = zip((start + seconds[late]).tolist(), steps[late].tolist(), seconds[late].tolist(), strict=True)
            self.busy |= {client: LateUpdate(*each) for client, each in zip(clients[late].tolist(), work, strict=True)}
        at_work = seconds if self.late == "stale" else np.minimum(seconds, deadline)
        done.simulated = {"simulated_seconds": lasts, "simulated_time": self.now}
        if self.participation.has_late_clients:
            lost = ~replies
            done.simulated |= {"late": int(late.sum()), "lost_steps": int(taken[lost].sum())}
            done.simulated["lost_seconds"] = float(at_work[lost].sum())
        sent = {"bytes_down": np.full(len(clients), self.bytes_down), "bytes_up": np.where(replies, self.bytes_up, 0)}
        for name, values in {"steps": taken, "simulated_seconds": at_work, **sent}.items():
            done.client_metrics[name] = clients, values
        return dict(zip(clients[replies].tolist(), taken[replies].tolist(), strict=True))

    def _find_deadline(self, seconds: np.ndarray) -> float:
        """Return after how many seconds a client of the cohort (m,) is late, infinity for never."""
        limit, share = read_deadline(self.participation.config.deadline)
        ordered, wanted = np.sort(seconds), self.participation.select
        if share is not None and len(ordered):
            limit = min(limit, float(ordered[round_up(share * len(ordered)) - 1]))
        if self.participation.config.over_select is not None and wanted is not None and len(ordered) > wanted:
            limit = min(limit, float(ordered[wanted - 1]))
        return limit

    def _find_length(self, seconds: np.ndarray, deadline: float) -> float:
        """Return how long a round lasts. Without a cohort it waits for a late reply, if there is any."""
        if not len(seconds):
            return min(deadline, min(each.arrives for each in self.busy.values()) - self.now) if self.busy else 0.0
        return min(float(seconds.max()), deadline)

    def exchange(self, valid: Sequence[Reply], done: Round, broadcast: Callable[[], Tensors]) -> list[Reply]:
        """Keep the late replies of this round, and return the others with those that arrive until its end.

        Args:
            valid: The valid replies of this round's cohort.
            done: The log of the round.
            broadcast: Returns what clients receive in this round, by message name.
        """
        if self.late != "stale":
            return list(valid)
        ended = {client: each.reply for client, each in self.busy.items() if each.arrives <= self.now}
        self.busy = {client: each for client, each in self.busy.items() if client not in ended}
        arrived = {client: reply for client, reply in sorted(ended.items()) if reply is not None}
        received = broadcast() if arrived else {}
        found = [self._renew_of(client, reply, done.server_round, received) for client, reply in arrived.items()]
        for reply in valid:
            if late := self.busy.get(reply.client):
                kept = {"num_examples": reply.num_examples, "metrics": reply.metrics, "norm": reply.norm}
                late.reply = {**kept, "server_round": done.server_round, "tensors": self._changes(reply)}
            else:
                found.append(reply)
        done.simulated["stale"] = len(arrived)
        return found

    def lose_busy(self, done: Round) -> None:
        """Log the work of clients that are still busy after the last round as lost in it, because it is never used."""
        log_lost(self.busy.values(), done)

    def _renew_of(self, client: int, kept: dict[str, Any], server_round: int, received: Tensors) -> Reply:
        """Return a late reply as that of a client that starts from ``received`` now, with its update times its weight."""
        staleness = server_round - kept.pop("server_round")
        weight = weigh_by_staleness(staleness, self.participation.config.staleness_a)
        scaled = {name: weight * value if name.startswith("delta/") else value for name, value in kept.pop("tensors").items()}
        return Reply(client, received=received, tensors=scaled, **kept)

    def _changes(self, reply: Reply) -> Tensors:
        """Return a reply's update, and its buffers as they are. All are copies, because workers use their memory again."""
        changes, models = reply.get_tensors("delta"), reply.get_tensors("model") if self.buffers else {}
        found = {f"delta/{name}": value for name, value in changes.items() if name not in self.buffers}
        found |= {f"model/{name}": value for name, value in models.items() if name in self.buffers}
        return {name: value.clone() for name, value in found.items()}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs of it."""
        return {"now": self.now, "busy": {client: dict(vars(each)) for client, each in self.busy.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.now, self.busy = float(state["now"]), {client: LateUpdate(**each) for client, each in state["busy"].items()}


def log_lost(updates: Iterable[Any], done: Round) -> None:
    """Add the ``steps`` and ``seconds`` of updates that are never used to a round's lost work."""
    for each in updates:
        done.simulated["lost_steps"] += each.steps
        done.simulated["lost_seconds"] += each.seconds


def count_bytes(spec: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bytes of a message's tensors in single precision."""
    return sum(4 * math.prod(shape) for shape in spec.values())


def find_stale_obstacle(strategy: Any) -> str:
    """Return why a strategy cannot use replies to an earlier round's model, empty if it can."""
    kind: Any = type(strategy)
    base: Any = next(parent for parent in kind.__mro__ if parent.__name__ == "FederatedStrategy")
    unlike = sorted({name.partition("/")[0] for name in strategy.upload_spec} - OTHER_PREFIX.keys())
    reasons = {
        "its strategy uses more of the replies than means of their updates": not vars(kind).get("linear_in_updates"),
        "its strategy sends each client tensors of its own": kind.per_client_broadcast is not base.per_client_broadcast,
        f"its clients also upload {', '.join(unlike)}, which belong to the round": bool(unlike),
        "privacy=central protects the clients of one round": strategy.privacy is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def write_requests(common: Mapping[str, Any], costs: Mapping[int, int], planned: Mapping[int, int]) -> dict[int, ConfigRecord]:
    """Return the settings of each client's message. Clients with equal ones share a record.

    Args:
        common: Settings for all.
        costs: Each client's local steps.
        planned: The steps that it takes, fewer if it is to stop early. Clients without an entry are not asked.
    """
    records: dict[tuple[int, int], ConfigRecord] = {}
    for client, steps in planned.items():
        early = {"max-steps": steps} if steps < costs[client] else {}
        if (steps, len(early)) not in records:
            records[steps, len(early)] = ConfigRecord({**common, "cost": steps, **early})
    return {client: records[steps, int(steps < costs[client])] for client, steps in planned.items()}
