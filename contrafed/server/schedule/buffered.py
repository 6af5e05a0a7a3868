"""buffered: aggregate K replies as they arrive, while M clients train, each from the model of its time (FedBuff, FedAsync)."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from flwr.app import Message

from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors, add_prefix, select_prefix, size_of
from contrafed.data.clock import Clock
from contrafed.server import checks
from contrafed.server.replies import OTHER_PREFIX, Reply

# Returns the simulated seconds from the broadcast to the reply of clients (m,) that start in a round.
Seconds = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Config:
    """Settings of the schedule, each with the papers' symbol."""

    buffer_size: Annotated[int, Range(ge=1)]  # K
    concurrency: Annotated[int, Range(ge=1)]  # M
    staleness: Literal["constant", "polynomial", "hinge"]  # s
    staleness_a: Annotated[float, Range(ge=0)]  # a
    staleness_b: Annotated[int, Range(ge=0)]  # b
    mixes: Literal["updates", "models"]

    def weight(self, staleness: int) -> float:
        """Return the weight of an update that ``staleness`` aggregations came before (FedAsync, section 5.2).

        Deviation: FedAsync counts from 1. Here a fresh update has staleness 0 and weight 1, as in FedBuff.
        """
        if self.staleness == "polynomial":
            return float((1 + staleness) ** -self.staleness_a)
        if self.staleness == "hinge" and staleness > self.staleness_b:
            return 1 / (1 + self.staleness_a * (staleness - self.staleness_b))
        return 1.0


@dataclass(eq=False)
class Training:
    """A client's local update between its start and its arrival, in simulated time."""

    client: int
    server_round: int  # of its start
    arrives: float  # simulated seconds after the last aggregation
    reply: Reply | None = None  # None if the client failed, or if its reply was rejected


class Buffered:
    """The clients in training, and the order of their arrivals.

    A round is one aggregation. A client starts from the model of the last one. What it uploads is computed at once, and is used
    when its simulated time has passed. So clients that start from one model train as a stack.

    The order of arrivals depends on the clock and the seed alone, never on a reply. A client that fails keeps its place in it.

    Source: Nguyen et al. 2022 (FedBuff, arXiv:2106.06639), Algorithm 1. Xie et al. 2019 (FedAsync, arXiv:1903.03934) is
    ``buffer_size=1`` and ``mixes=models``, with the server's learning rate as its alpha.

    Deviation: a client starts at most once from each model and arrives at most once in a round, because it would repeat the
    same draws.
    """

    def __init__(self, config: Config, seconds: Seconds, seed: int) -> None:
        """Begin without clients in training."""
        self.config, self.seconds, self.seed = config, seconds, seed
        self.training: list[Training] = []
        self.arrived: list[Training] = []  # in this round
        self.elapsed = 0.0  # simulated seconds of this round

    def start(self, cohort: np.ndarray, server_round: int) -> np.ndarray:
        """Simulate until the buffer is full, and return the clients that start until then, sorted.

        Clients start in a drawn order, as soon as fewer than M train. Of clients that arrive at the same time the smaller
        partition id is the first. If none is left that could arrive, the buffer stays short.

        Args:
            cohort: The clients that may start in this round (m,): selected, available and with data.
            server_round: The round.
        """
        order = generator(self.seed, "order of starts", server_round - 1).permutation(cohort)
        order = order[~np.isin(order, [each.client for each in self.training])]
        waiting = zip(order.tolist(), self.seconds(order, server_round).tolist(), strict=True)
        self.arrived, self.elapsed = [], 0.0
        while len(self.arrived) < self.config.buffer_size:
            free = max(self.config.concurrency - len(self.training), 0)
            starts = islice(waiting, free)
            self.training += [Training(client, server_round, self.elapsed + seconds) for client, seconds in starts]
            if not self.training:
                break
            self.training.sort(key=lambda each: (each.arrives, each.client))
            self.elapsed = self.training[0].arrives
            here = sum(each.arrives == self.elapsed for each in self.training)
            here = min(here, self.config.buffer_size - len(self.arrived))
            self.arrived, self.training = self.arrived + self.training[:here], self.training[here:]
        for each in self.training:
            each.arrives -= self.elapsed
        started = [each.client for each in (*self.arrived, *self.training) if each.server_round == server_round]
        return np.array(sorted(started), dtype=np.int64)

    def collect(self, strategy: Any, replies: Iterable[Message]) -> list[Reply]:
        """Keep the valid replies of the clients that started in this round, and return those of the clients that arrived.

        A stale reply is returned as an update of the present model. Staleness and the numbers of arrivals are written to the
        round's metrics.
        """
        log = strategy.round
        valid = {reply.client: reply for reply in strategy.accept(replies)}
        for each in (*self.arrived, *self.training):
            if each.server_round == log.server_round:
                each.reply = valid.get(each.client)
        for each in self.training:  # the present aggregation makes them stale
            if each.reply is not None and each.server_round == log.server_round:
                each.reply = self._reduce(each.reply, strategy.buffers)
        staleness = [log.server_round - each.server_round for each in self.arrived]
        received = checks.broadcast(strategy, strategy.broadcast, strategy.model) if any(staleness) else {}
        found = [
            self._renew(each.reply, received, self.config.weight(late)) if late else each.reply
            for each, late in zip(self.arrived, staleness, strict=True)
            if each.reply is not None
        ]
        log.bytes_up = sum(size_of(reply.tensors) for reply in found)
        log.metrics |= {"arrived": len(staleness), "dropped": len(staleness) - len(found)}
        if staleness:
            log.metrics |= {"staleness_mean": float(np.mean(staleness)), "staleness_max": max(staleness)}
        return found

    def _reduce(self, reply: Reply, buffers: frozenset[str]) -> Reply:
        """Return what a later round needs of a reply: its update or its model, and all else that was uploaded.

        Buffers of the model are kept as uploaded, because a variance plus the change of another may be below 0.
        """
        group = "delta" if self.config.mixes == "updates" else "model"
        own = {name: value for name, value in reply.get_tensors(group).items() if name not in buffers}
        kept = {name: value for name, value in reply.get_tensors("model").items() if name in buffers}
        rest = {name: value for name, value in reply.tensors.items() if name.partition("/")[0] not in OTHER_PREFIX}
        return replace(reply, tensors=rest | add_prefix(f"stale_{group}", own) | add_prefix("model", kept), received={})

    def _renew(self, reply: Reply, received: Tensors, weight: float) -> Reply:
        """Return a reduced reply as that of a client that starts from ``received`` now, with its update times ``weight``."""
        base = select_prefix(received, "model")
        update = select_prefix(reply.tensors, "stale_delta")
        for name, value in select_prefix(reply.tensors, "stale_model").items():
            update[name] = value - base[name].to(value.device)
        rest = {name: value for name, value in reply.tensors.items() if not name.startswith("stale_")}
        scaled = {name: weight * value for name, value in update.items()}
        return replace(reply, tensors=rest | add_prefix("delta", scaled), received=received)

    def state(self) -> list[dict[str, Any]]:
        """Return the clients in training with their replies, as a checkpoint after a round holds them."""
        return [{**vars(each), "reply": each.reply and vars(each.reply)} for each in self.training]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Continue from what ``state`` returned."""
        self.training = [Training(**{**entry, "reply": entry["reply"] and Reply(**entry["reply"])}) for entry in state]


def make_schedule(choice: Choice, clock: Clock | None, strategy: Any) -> Buffered | None:
    """Return the schedule of a run, None for a synchronous one. Raises ``UserError`` if an update would not be known."""
    if not isinstance(choice.config, Config):
        return None
    assert clock is not None  # by check_schedule
    unknown = {name for name in strategy.upload_spec if name.startswith("model/")} - strategy.broadcast_spec.keys()
    if unknown:
        raise UserError(
            f"schedule=buffered: clients upload {min(unknown)}, which they do not receive, so its update is not known. "
            "Fix: schedule=synchronous"
        )
    down, up = (4 * sum(map(math.prod, spec.values())) for spec in (strategy.broadcast_spec, strategy.upload_spec))

    def compute_seconds(clients: np.ndarray, server_round: int) -> np.ndarray:
        steps = np.array([*checks.costs(strategy, clients).values()], dtype=np.int64)
        return clock.seconds(clients, server_round, steps, down, up)

    return Buffered(choice.config, compute_seconds, strategy.participation.draw_seed)
