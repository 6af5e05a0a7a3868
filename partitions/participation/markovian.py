"""markovian: node k's availability is a two-state Markov chain whose stationary probability is p_k."""

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
    """Away nodes return with probability p01, present ones leave with p10. Source: PMFL section VI.

    Deviation: the paper prints p10 = (1 - p_k) p01, whose stationary participation is 1/(2 - p_k), not p_k (``chain:
    paper``). The default is FedAU's: p10 = p01 (1/p_k - 1), and where that exceeds 1, p01 is divided by it and p10 = 1.
    The chain starts from Bernoulli(p_k) and moves once before the first round.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities and work out the transitions."""
        self.probabilities = self.p = probabilities(self.config, class_proportions, self.num_nodes, self.seed)
        self.p01, self.p10 = transitions(self.p, self.config.p01, self.config.chain)
        self._restart()

    def _restart(self) -> None:
        rng = generator(self.seed, "availability start")
        self._round, self._state = 0, rng.random(self.num_nodes) < self.p

    def available(self, server_round: int) -> np.ndarray:
        """Return which nodes are available, (K,) bool; moving on a round costs O(K), going back replays from the start."""
        if server_round < self._round:
            self._restart()
        while self._round < server_round:
            draw = generator(self.seed, "availability", self._round).random(self.num_nodes)
            self._state = np.where(self._state, draw >= self.p10, draw < self.p01)
            self._round += 1
        return self._state.copy()

    def presence(self) -> np.ndarray:
        """Return the chain's stationary probability p01 / (p01 + p10) (K,): p_k, or with ``chain: paper`` 1 / (2 - p_k)."""
        return self.p01 / (self.p01 + self.p10)


def transitions(p: np.ndarray, p01: float, chain: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of returning (p01) and of leaving (p10), each (K,), for stationary probabilities p (K,)."""
    if chain == "paper":
        return np.full_like(p, p01), (1 - p) * p01
    with np.errstate(divide="ignore"):
        p10 = np.where(p > 0, p01 * (1 / np.where(p > 0, p, 1) - 1), np.inf)
    return np.where(p10 > 1, p01 / np.maximum(p10, 1), p01), np.minimum(p10, 1)
