"""Sum the replies of a large cohort in chunks, so that memory does not grow with the cohort."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType

from contrafed.core.tensors import Tensors, select_prefix
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server import checks
from contrafed.server.buffers import are_sent
from contrafed.server.replies import OTHER_PREFIX, Replies, Reply

# Clients of a chunk. A smaller cohort is summed at once. Sums depend on this number by rounding, so it is the same everywhere.
CHUNK_CLIENTS = 256


def find_obstacle(strategy: Any) -> str:
    """Return why a strategy needs all replies of a round at once, empty if sums of chunks are enough."""
    kind: Any = type(strategy)
    base: Any = next(parent for parent in kind.__mro__ if parent.__name__ == "FederatedStrategy")
    unlike = sorted({name.partition("/")[0] for name in strategy.upload_spec} - OTHER_PREFIX.keys())
    reasons = {
        f"{kind.__name__} reads replies one by one": not vars(kind).get("linear_in_updates"),
        f"{kind.__name__} sends each client tensors of its own": kind.per_client_broadcast is not base.per_client_broadcast,
        f"clients also upload {', '.join(unlike)}": bool(unlike),
        # An inherited function has the weights of an inherited ``aggregate``.
        f"{kind.__name__} states no reply_weights for its aggregate": kind.reply_weights is base.reply_weights
        or not issubclass(_find_definer(kind, "reply_weights"), _find_definer(kind, "aggregate")),
        "aggregation= reads replies one by one": strategy.aggregation is not None,
        "privacy=central clips replies one by one": strategy.privacy is not None,
        "model.buffers=average has weights of its own": are_sent(strategy),
        "late=stale keeps replies one by one": strategy.time is not None and strategy.time.late == "stale",
        "log= reads replies one by one": strategy.on_aggregated is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class SummedReplies(Replies):
    """The valid replies of a large cohort. Only the weighted sums of their tensors are kept."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(())
        self._strategy, self._totals, self._received = strategy, Tensors(), Tensors()

    def add(self, replies: Sequence[Reply]) -> None:
        """Add the replies of a chunk, sorted by partition id, to the sums."""
        if not replies:
            return
        weights = self._strategy.reply_weights(*_about(replies))
        total, self._received = weighted_sum([reply.tensors for reply in replies], weights.tolist()), replies[0].received
        self._totals = {name: value + self._totals[name] for name, value in total.items()} if self._totals else total
        self._replies += [replace(reply, tensors={}, received={}) for reply in replies]

    @property
    def device(self) -> torch.device | None:
        """The device of the sums."""
        return next((total.device for total in self._totals.values()), None)

    def get_tensors(self, name: str) -> list[Tensors]:
        """Raise ``RunStopped``, because no reply's tensors are kept."""
        self._stop(f"says linear_in_updates and reads {name} of single replies. Fix: linear_in_updates = False")

    def weighted_sum(self, group: str, weights: np.ndarray) -> Tensors:
        """Return ``sum_k weights[k] * tensor_k`` in float64, for weights in proportion to the strategy's ``reply_weights``."""
        self.note_weights(weights)
        known = self._strategy.reply_weights(*_about(self._replies))
        scale = float(weights.sum() / known.sum())
        if not np.allclose(weights, scale * known, rtol=1e-9, atol=0):
            self._stop("sums replies with other weights than its reply_weights. Fix: the same weights in both")
        if found := select_prefix(self._totals, group):
            return {name: scale * total for name, total in found.items()}
        sign = 1 if group == "model" else -1  # the other is uploaded. All clients received one model
        base, whole = select_prefix(self._received, "model"), float(known.sum())
        sums = select_prefix(self._totals, OTHER_PREFIX[group])
        return {n: scale * (total + sign * whole * base[n].to(total.device)) for n, total in sums.items()}

    def _stop(self, what: str) -> NoReturn:
        raise checks.build_stop_error(self._strategy, f"{type(self._strategy).__name__}.aggregate {what}")

    def weighted_terms(self, group: str, weights: np.ndarray) -> tuple[list[Tensors], list[float]]:
        """Return the sum itself as one term."""
        return [self.weighted_sum(group, weights)], [1.0]


class Chunks:
    """The clients of a round that are still to be asked, and the sums of the replies so far."""

    def __init__(self, strategy: Any, asked: dict[int, ConfigRecord]) -> None:
        self.strategy, self.sums = strategy, SummedReplies(strategy)
        self._asked, self.left = iter(asked.items()), len(asked)

    def write(self) -> list[Message]:
        """Return the messages to the next chunk of clients."""
        strategy, chunk = self.strategy, dict(islice(self._asked, CHUNK_CLIENTS))
        self.left -= len(chunk)
        found: list[Message] = strategy.write_messages(
            MessageType.TRAIN, strategy.round.server_round, strategy.model, strategy.broadcast, chunk
        )
        return found


def divide(strategy: Any, grid: Any, asked: dict[int, ConfigRecord]) -> Chunks | None:
    """Return the chunks of a round, None if all its clients are asked at once."""
    large = len(asked) > CHUNK_CLIENTS and getattr(grid, "divides_rounds", False)
    return Chunks(strategy, asked) if large and not find_obstacle(strategy) else None


def collect(strategy: Any, replies: Iterable[Message]) -> Replies:
    """Check replies, and return the valid ones, or the sums of all chunks so far."""
    passed = strategy.norm_limit.filter(strategy.accept(replies), strategy.round)
    if strategy.time is not None:
        passed = strategy.time.exchange(
            passed, strategy.round, lambda: checks.broadcast(strategy, strategy.broadcast, strategy.model)
        )
    valid = Replies(passed, strategy.aggregation)
    if strategy.chunks is None:
        return valid
    strategy.chunks.sums.add(valid)
    sums: Replies = strategy.chunks.sums
    return sums


def exchange(strategy: Any, grid: Any, messages: Iterable[Message], timeout: float | None) -> Iterable[Message]:
    """Send a round's messages, one chunk after another, and return the replies of the last chunk."""
    ends = None if timeout is None else time.monotonic() + timeout
    replies: Iterable[Message] = grid.send_and_receive(messages, timeout=timeout)
    while strategy.chunks is not None and strategy.chunks.left:
        collect(strategy, replies)
        del replies, messages  # their memory serves the next chunk
        messages = strategy.chunks.write()
        replies = grid.send_and_receive(messages, timeout=None if ends is None else max(ends - time.monotonic(), 1e-3))
    return replies


def _find_definer(kind: type, name: str) -> type:
    return next(parent for parent in kind.__mro__ if name in vars(parent))


def _about(replies: Sequence[Reply]) -> tuple[np.ndarray, np.ndarray]:
    """Return the clients of replies (m,), and their numbers of examples (m,), float64."""
    clients = np.array([reply.client for reply in replies], dtype=np.int64)
    return clients, np.array([reply.num_examples for reply in replies], dtype=np.float64)
