"""bernoulli: client k is available with probability p_k, independently in every round."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from contrafed.core.randomness import generator
from contrafed.data.participation import Heterogeneous, Participation, probabilities


@dataclass(frozen=True)
class Config(Heterogeneous):
    """Settings of the pattern: those of the probabilities."""


class Bernoulli(Participation):
    """Draw the availability A_k^t ~ Bernoulli(p_k).

    Source: PMFL section VI.
    """

    everyone = False
    independent_draws = True

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities."""
        self.probabilities = self.p = probabilities(self.config, class_proportions, self.num_clients, self.seed)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        return generator(self.seed, "availability", server_round - 1).random(self.num_clients) < self.p

    def presence(self) -> np.ndarray:
        """Return p_k (K,)."""
        return self.p
