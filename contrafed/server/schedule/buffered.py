"""buffered: aggregate K replies as they arrive, while M clients train, each from the model of its time (FedBuff, FedAsync)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import OnlyWith, Range
from contrafed.core.tensors import Tensors, add_prefix, select_prefix, size_of
from contrafed.data.clock import Clock
from contrafed.data.participation import Participation
from contrafed.server.replies import OTHER_PREFIX, Reply
from contrafed.server.round_log import Round
from contrafed.server.simulated_time import SimulatedTime, log_lost, weigh_by_staleness


@dataclass(frozen=True)
class Config:
    """Settings of the schedule, each with the papers' symbol."""

    buffer_size: Annotated[int, Range(ge=1)]  # K
    concurrency: Annotated[int, Range(ge=1)]  # M
    staleness: Literal["constant", "polynomial", "hinge"]  # s
    staleness_a: Annotated[float, Range(ge=0), OnlyWith("staleness", "polynomial", "hinge")]  # a
    staleness_b: Annotated[int, Range(ge=0), OnlyWith("staleness", "hinge")]  # b
    mixes: Literal["updates", "models"]

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that ``staleness`` aggregations came before (FedAsync, section 5.2).

        Deviation: FedAsync counts from 1. Here a fresh update has staleness 0 and weight 1, as in FedBuff.
        """
        if self.staleness == "polynomial":
            return weigh_by_staleness(staleness, self.staleness_a)
        if self.staleness == "hinge" and staleness > self.staleness_b:
            return 1 / (1 + self.staleness_a * (staleness - self.staleness_b))
        return 1.0


@dataclass(eq=False)
class Training:
    """A client's local update between its start and its arrival, in simulated time."""

    client: int
    server_round: int  # of its start
    arrives: float  # simulated seconds after the last aggregation
    steps: int
    seconds: float  # simulated, from the download to the end of the upload
    reply: Reply | None = None  # None if the client failed, or if its reply was rejected


class BufferedTime(SimulatedTime):
    """The clients in training, and the order of their arrivals.

    A round is one aggregation. A client starts from the model of the last one. What it uploads is computed at once, and is used
    when its simulated time has passed. So clients that start from one model train as a stack.

    The order of arrivals depends on the clock and the seed alone, never on a reply. A client that fails keeps its place in it.

    Source: Nguyen et al. 2022 (FedBuff, arXiv:2106.06639), Algorithm 1. Xie et al. 2019 (FedAsync, arXiv:1903.03934) is
    ``buffer_size=1`` and ``mixes=models``, with the server's learning rate as its alpha.

    Deviation: a client starts at most once from each model and arrives at most once in a round, because it would repeat the
    same draws.
    """

    def __init__(self, config: Config, clock: Clock, strategy: Any, participation: Participation) -> None:
        """Begin without clients in training. Raises ``UserError`` if an update would not be known."""
        super().__init__(clock, strategy, participation)
        self.config, self.late = config, "stale"  # all replies may be
        self.training: list[Training] = []
        self.arrived: list[Training] = []  # in this round
        unknown = {name for name in strategy.upload_spec if name.startswith("model/")} - strategy.broadcast_spec.keys()
        if unknown:
            raise UserError(
                f"schedule=buffered: clients upload {min(unknown)}, which they do not receive, so its update is not known. "
                "Fix: schedule=synchronous"
            )

    def leave_out_busy(self, clients: np.ndarray) -> np.ndarray:
        """Return the clients that are not in training."""
        return clients[~np.isin(clients, [each.client for each in self.training])]

    def plan(self, done: Round, costs: Mapping[int, int]) -> dict[int, int]:
        """Simulate until the buffer is full, and log the round's simulated seconds.

        Clients start in a drawn order, as soon as fewer than M train. Of clients that arrive at the same time the smaller
        partition id is the first. If none is left that could arrive, the buffer stays short.

        Args:
            done: The log of the round, with the clients that could start.
            costs: Each client's local steps, by partition id.

        Returns:
            The clients that start, with their steps.
        """
        t = done.server_round
        order = generator(self.participation.draw_seed, "order of starts", t - 1).permutation(done.participants)
        steps = np.array([costs[client] for client in order.tolist()], dtype=np.int64)
        seconds = self.clock.seconds(order, t, steps, self.bytes_down, self.bytes_up)
        count, lasts = self._simulate(t, zip(order.tolist(), steps.tolist(), seconds.tolist(), strict=True))
        self.now += lasts
        done.simulated = {"simulated_seconds": lasts, "simulated_time": self.now, "lost_steps": 0, "lost_seconds": 0.0}
        first = np.argsort(order[:count])  # those that started, by partition id
        clients, steps, seconds = order[first], steps[first], seconds[first]
        done.participants, done.bytes_down = clients, count * self.bytes_down
        sent = {"bytes_down": np.full(count, self.bytes_down), "bytes_up": np.full(count, self.bytes_up)}
        for name, values in {"steps": steps, "simulated_seconds": seconds, **sent}.items():
            done.client_metrics[name] = clients, values
        return dict(zip(clients.tolist(), steps.tolist(), strict=True))

    def _simulate(self, server_round: int, waiting: Iterator[tuple[int, int, float]]) -> tuple[int, float]:
        """Let clients start and arrive until K have arrived, and return how many started, and the seconds that passed.

        Args:
            server_round: The round.
            waiting: The clients that could start, with the steps and seconds that each of them takes.
        """
        now, self.arrived, started = 0.0, [], 0
        while len(self.arrived) < self.config.buffer_size:
            for client, steps, seconds in islice(waiting, max(self.config.concurrency - len(self.training), 0)):
                self.training.append(Training(client, server_round, now + seconds, steps, seconds))
                started += 1
            if not self.training:
                break
            self.training.sort(key=lambda each: (each.arrives, each.client))
            now = self.training[0].arrives
            # All that arrive at this moment, before their places are taken.
            count = min(sum(each.arrives == now for each in self.training), self.config.buffer_size - len(self.arrived))
            self.arrived, self.training = self.arrived + self.training[:count], self.training[count:]
        for each in self.training:
            each.arrives -= now
        return started, now

    def exchange(self, valid: Sequence[Reply], done: Round, broadcast: Callable[[], Tensors]) -> list[Reply]:
        """Keep the replies of the clients that started in this round, and return those of the clients that arrived.

        A stale reply is returned as an update of the present model.

        Args:
            valid: The valid replies of the clients that started.
            done: The log of the round.
            broadcast: Returns what clients receive in this round, by message name.
        """
        t, replies = done.server_round, {reply.client: reply for reply in valid}
        for each in self.arrived:
            if each.server_round == t:
                each.reply = replies.get(each.client)
        for each in self.training:
            if each.server_round == t and each.client in replies:  # this round's aggregation makes it stale
                each.reply = self._reduce(replies[each.client])
        staleness = [t - each.server_round for each in self.arrived]
        received = broadcast() if any(staleness) else {}
        found = [
            self._renew(each.reply, received, self.config.weight(late)) if late else each.reply
            for each, late in zip(self.arrived, staleness, strict=True)
            if each.reply is not None
        ]
        done.bytes_up = sum(size_of(reply.tensors) for reply in found)
        done.simulated |= {"arrived": len(staleness), "dropped": len(staleness) - len(found)}
        if staleness:
            done.metrics |= {"staleness_mean": float(np.mean(staleness)), "staleness_max": max(staleness)}
        return found

    def lose_busy(self, done: Round) -> None:
        """Log the work of clients in training after the last round as lost in it, because it is never used."""
        log_lost(self.training, done)

    def _reduce(self, reply: Reply) -> Reply:
        """Return what a later round needs of a reply: its update or its model, and all else that was uploaded.

        Buffers of the model are kept as uploaded, because a variance plus the change of another may be below 0. All are copies,
        because workers use their memory again.
        """
        group = "delta" if self.config.mixes == "updates" else "model"
        own = {name: value for name, value in reply.get_tensors(group).items() if name not in self.buffers}
        kept = {name: value for name, value in reply.get_tensors("model").items() if name in self.buffers}
        rest = {name: value for name, value in reply.tensors.items() if name.partition("/")[0] not in OTHER_PREFIX}
        found = rest | add_prefix(f"stale_{group}", own) | add_prefix("model", kept)
        return replace(reply, tensors={name: value.clone() for name, value in found.items()}, received={})

    def _renew(self, reply: Reply, received: Tensors, weight: float) -> Reply:
        """Return a reduced reply as that of a client that starts from ``received`` now, with its update times ``weight``."""
        base = select_prefix(received, "model")
        update = select_prefix(reply.tensors, "stale_delta")
        for name, value in select_prefix(reply.tensors, "stale_model").items():
            update[name] = value - base[name].to(value.device)
        rest = {name: value for name, value in reply.tensors.items() if not name.startswith("stale_")}
        scaled = {name: weight * value for name, value in update.items()}
        return replace(reply, tensors=rest | add_prefix("delta", scaled), received=received)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint after a round needs of it: the moment, and the clients in training with their replies."""
        training = [{**vars(each), "reply": each.reply and vars(each.reply)} for each in self.training]
        return {"now": self.now, "training": training}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        self.now = float(state["now"])
        entries = [(entry, entry["reply"]) for entry in state["training"]]
        self.training = [Training(**{**entry, "reply": reply and Reply(**reply)}) for entry, reply in entries]
