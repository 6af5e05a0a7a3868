"""separated: after a round in which client k is available, it is away for a minimum number of rounds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.participation import Heterogeneous, Participation, probabilities


@dataclass(frozen=True)
class Config(Heterogeneous):
    """Settings of the pattern."""

    separation: Annotated[int, Range(ge=0)]  # R, rounds


class Separated(Participation):
    """Draw the availability A_k^t ~ Bernoulli(p_k), if client k was away in the last R rounds, and else 0.

    The long-run share of rounds is 1 / (R + 1 / p_k). Round 1 is the first in which any client can be available.

    Source: the minimum separation of Sun et al. 2024 (arXiv 2410.01209). There the server selects among the clients that have
    waited. Here each client has its own probability.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities."""
        self.probabilities = self.p = probabilities(self.config, class_proportions, self.num_clients, self.seed)
        self._restart()

    def _restart(self) -> None:
        self._round, self._last = 0, np.full(self.num_clients, -1 - self.config.separation, dtype=np.int64)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients.

        The next round costs O(K). An earlier round replays all rounds from the start.
        """
        if server_round < self._round:
            self._restart()
        while self._round < server_round:
            drawn = generator(self.seed, "availability", self._round).random(self.num_clients) < self.p
            self._last[drawn & (self._round - self._last > self.config.separation)] = self._round
            self._round += 1
        here: np.ndarray = self._last == server_round - 1
        return here

    def presence(self) -> np.ndarray:
        """Return 1 / (R + 1 / p_k) (K,), 0 for p_k = 0."""
        shares: np.ndarray = self.p / (1 + self.config.separation * self.p)
        return shares
