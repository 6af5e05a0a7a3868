"""markovian: client k's availability is a two-state Markov chain with stationary probability p_k."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.participation import Heterogeneous, Participation, probabilities


@dataclass(frozen=True)
class Config(Heterogeneous):
    """Settings of the pattern."""

    p01: Annotated[float, Range(gt=0, le=1)]
    chain: Literal["fedau", "paper"]


class Markovian(Participation):
    """Absent clients return with probability p01, and present ones leave with p10.

    The chain starts from Bernoulli(p_k) and takes one step before the first round.

    Source: PMFL section VI.

    Deviation: by default p10 = p01 (1/p_k - 1), as in FedAU. If that exceeds 1, p01 is divided by it and p10 = 1. The paper
    prints p10 = (1 - p_k) p01 (``chain: paper``). Its stationary participation is 1/(2 - p_k), not p_k.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities and compute the transitions."""
        self.probabilities = self.p = probabilities(self.config, class_proportions, self.num_clients, self.seed)
        self.p01, self.p10 = transitions(self.p, self.config.p01, self.config.chain)
        self._restart()

    def _restart(self) -> None:
        rng = generator(self.seed, "availability start")
        self._round, self._state = 0, rng.random(self.num_clients) < self.p

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients.

        The next round costs O(K). An earlier round replays the chain from the start.
        """
        if server_round < self._round:
            self._restart()
        while self._round < server_round:
            draw = generator(self.seed, "availability", self._round).random(self.num_clients)
            self._state = np.where(self._state, draw >= self.p10, draw < self.p01)
            self._round += 1
        return self._state.copy()

    def presence(self) -> np.ndarray:
        """Return the chain's stationary probability p01 / (p01 + p10) (K,).

        It is p_k, or 1 / (2 - p_k) with ``chain: paper``.
        """
        return self.p01 / (self.p01 + self.p10)


def transitions(p: np.ndarray, p01: float, chain: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of returning (p01) and of leaving (p10), (K,) each.

    Args:
        p: Stationary probabilities (K,).
        p01: The configured probability of returning.
        chain: Whose transitions, ``fedau`` or ``paper``.
    """
    if chain == "paper":
        return np.full_like(p, p01), (1 - p) * p01
    with np.errstate(divide="ignore"):
        p10 = np.where(p > 0, p01 * (1 / np.where(p > 0, p, 1) - 1), np.inf)
    return np.where(p10 > 1, p01 / np.maximum(p10, 1), p01), np.minimum(p10, 1)
