"""arrival: nodes that join in a given round, and nodes that leave for good in a given round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.data.participation import Participation, Selection

NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Config(Selection):
    """Settings of the pattern: who joins, and who leaves, as pairs of a round and a share of all nodes or a list of them."""

    joins: tuple[Any, ...]
    leaves: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Raise ``UserError`` for what is no pair of a round and nodes."""
        for key, pairs in (("joins", self.joins), ("leaves", self.leaves)):
            for i, pair in enumerate(pairs):
                where = f"participation.{key}[{i}]"
                if not isinstance(pair, list | tuple) or len(pair) != 2 or not _is_whole(pair[0]) or not 1 <= pair[0] < NEVER:
                    raise UserError(f"{where} must be [ROUND, WHO], such as [100, 0.4] or [100, [3, 7]], got {pair!r}")
                who = pair[1]
                listed = isinstance(who, list | tuple) and len(who) > 0 and all(_is_whole(node) for node in who)
                if not listed and not (isinstance(who, float) and 0 < who <= 1):
                    raise UserError(f"{where}: who must be a share of all nodes above 0.0, at most 1.0, or a list, got {who!r}")


class Arrival(Participation):
    """Node k is there from its first round on until the round in which it leaves; who is in no list is there throughout.

    Own design (no paper has it). A share is drawn by the seed, without those that other entries of the same list name or
    drew, and for leaving among those that have joined by then.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw who joins and who leaves. Raises ``UserError`` for nodes that cannot."""
        self.first = self._rounds("joins", np.ones(self.num_nodes, dtype=np.int64), np.zeros(self.num_nodes, dtype=np.int64))
        self.left = self._rounds("leaves", np.full(self.num_nodes, NEVER), self.first)

    def _rounds(self, key: str, otherwise: np.ndarray, earliest: np.ndarray) -> np.ndarray:
        """Return the round of ``joins`` or ``leaves`` for each node (K,); those of ``leaves`` lie after ``earliest`` (K,)."""
        pairs, rounds, taken = getattr(self.config, key), otherwise.copy(), np.zeros(self.num_nodes, dtype=bool)
        for where, node, when in self._listed(key):
            if not 0 <= node < self.num_nodes:
                raise UserError(f"{where}: node {node} is not in 0..{self.num_nodes - 1}, the nodes that may train")
            if taken[node]:
                raise UserError(f"{where}: node {node} is there twice")
            if when <= earliest[node]:
                raise UserError(f"{where}: node {node} leaves in round {when}, but joins in round {earliest[node]}")
            rounds[node], taken[node] = when, True
        for i, (when, share) in enumerate(pairs):
            if not isinstance(share, float):
                continue
            count, free = max(1, round(share * self.num_nodes)), np.flatnonzero(~taken & (earliest < when))
            if count > len(free):
                raise UserError(
                    f"participation.{key}[{i}]: {count} nodes in round {when}, but only {len(free)} are left to draw"
                )
            drawn = generator(self.seed, f"arrival {key}", i).choice(free, count, replace=False)
            rounds[drawn], taken[drawn] = when, True
        return rounds

    def _listed(self, key: str) -> Iterator[tuple[str, int, int]]:
        """Yield where each node is listed, the node, and its round."""
        for i, (when, who) in enumerate(getattr(self.config, key)):
            if not isinstance(who, float):
                yield from ((f"participation.{key}[{i}]", node, when) for node in who)

    def available(self, server_round: int) -> np.ndarray:
        """Return which nodes are there, (K,) bool."""
        here: np.ndarray = (self.first <= server_round) & (server_round < self.left)
        return here


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
