"""arrival: clients that join or leave permanently in a given round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.data.participation import Participation, Selection

NEVER_ROUND = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Config(Selection):
    """Settings of the pattern: joins and leaves, as pairs of a round and clients.

    The clients are a share of all clients, or a list.
    """

    joins: tuple[Any, ...]
    leaves: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Raise ``UserError`` for an entry that is not a pair of a round and clients."""
        for key, pairs in (("joins", self.joins), ("leaves", self.leaves)):
            for i, pair in enumerate(pairs):
                where = f"participation.{key}[{i}]"
                if (
                    not isinstance(pair, list | tuple)
                    or len(pair) != 2
                    or not _is_whole(pair[0])
                    or not 1 <= pair[0] < NEVER_ROUND
                ):
                    raise UserError(f"{where} must be [ROUND, WHO], such as [100, 0.4] or [100, [3, 7]], got {pair!r}")
                who = pair[1]
                listed = isinstance(who, list | tuple) and len(who) > 0 and all(_is_whole(client) for client in who)
                if not listed and not (isinstance(who, float) and 0 < who <= 1):
                    raise UserError(
                        f"{where}: who must be a share of all clients above 0.0, at most 1.0, or a list, got {who!r}"
                    )


class Arrival(Participation):
    """Client k is available from its first round until the round of its leave.

    A client in no list is always available. A share of clients is drawn by the seed. The draw leaves out clients that other
    entries of the same list name or drew. For leaves it leaves out clients that have not joined by then.

    Source: this project's design, from no paper.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the clients that join and leave.

        Raises:
            UserError: If an entry names clients that cannot join or leave.
        """
        self.first = self._rounds(
            "joins", np.ones(self.num_clients, dtype=np.int64), np.zeros(self.num_clients, dtype=np.int64)
        )
        self.left = self._rounds("leaves", np.full(self.num_clients, NEVER_ROUND), self.first)

    def _rounds(self, key: str, otherwise: np.ndarray, earliest: np.ndarray) -> np.ndarray:
        """Return the round of ``joins`` or ``leaves`` for each client (K,), with leaves after ``earliest`` (K,)."""
        pairs, rounds, taken = getattr(self.config, key), otherwise.copy(), np.zeros(self.num_clients, dtype=bool)
        for where, client, when in self._iterate_listed_clients(key):
            if not 0 <= client < self.num_clients:
                raise UserError(f"{where}: client {client} is not in 0..{self.num_clients - 1}, the clients that may train")
            if taken[client]:
                raise UserError(f"{where}: client {client} is there twice")
            if when <= earliest[client]:
                raise UserError(f"{where}: client {client} leaves in round {when}, but joins in round {earliest[client]}")
            rounds[client], taken[client] = when, True
        for i, (when, share) in enumerate(pairs):
            if not isinstance(share, float):
                continue
            count, free = max(1, round(share * self.num_clients)), np.flatnonzero(~taken & (earliest < when))
            if count > len(free):
                raise UserError(
                    f"participation.{key}[{i}]: {count} clients in round {when}, but only {len(free)} are left to draw"
                )
            drawn = generator(self.seed, f"arrival {key}", i).choice(free, count, replace=False)
            rounds[drawn], taken[drawn] = when, True
        return rounds

    def _iterate_listed_clients(self, key: str) -> Iterator[tuple[str, int, int]]:
        """Yield the entry, client and round of each listed client."""
        for i, (when, who) in enumerate(getattr(self.config, key)):
            if not isinstance(who, float):
                yield from ((f"participation.{key}[{i}]", client, when) for client in who)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        here: np.ndarray = (self.first <= server_round) & (server_round < self.left)
        return here


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
