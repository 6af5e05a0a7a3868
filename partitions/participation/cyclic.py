"""cyclic: node k is available for the first share p_k of a cycle that starts at its own random offset."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.participation import Heterogeneous, Participation, probabilities


@dataclass(frozen=True)
class Config(Heterogeneous):
    """Settings of the pattern."""

    period: Annotated[int, Range(ge=1)]
    variant: Literal["pmfl", "fedau"]

    def __post_init__(self) -> None:
        """Raise ``UserError`` when the period has no room for FedAU's active and idle round."""
        super().__post_init__()
        if self.variant == "fedau" and self.period < 2:
            raise UserError(f"participation.period must be >= 2 for variant=fedau, got {self.period}")


class Cyclic(Participation):
    """A_k^t = 1 iff (t - o_k) mod period < period p_k. Source: PMFL section VI.

    That is ceil(period p_k) rounds of each cycle. ``variant: fedau`` has max(1, round(period p_k)) active rounds and at least
    one idle one, and o_k is uniform over 0 .. idle rounds - 1: a node waits o_k rounds, with o_k = 0 none, and its first active
    window is whole.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities and the offsets."""
        self.probabilities = probabilities(self.config, class_proportions, self.num_nodes, self.seed)
        period = self.config.period
        if self.config.variant == "pmfl":
            # 100 * 0.07 is a little more than 7 in floating point; relative, so that a tiny p_k keeps its one round.
            self.active = np.ceil(period * self.probabilities * (1 - 1e-12)).astype(np.int64)
            first: int | np.ndarray = period
        else:
            self.active = np.clip(np.rint(period * self.probabilities).astype(np.int64), 1, period - 1)
            first = period - self.active
        self.offsets = generator(self.seed, "availability offsets").integers(0, first, self.num_nodes)

    def available(self, server_round: int) -> np.ndarray:
        """Return which nodes are available, (K,) bool."""
        here: np.ndarray = (server_round - 1 - self.offsets) % self.config.period < self.active
        return here

    def presence(self) -> np.ndarray:
        """Return the share of a cycle that is active (K,): p_k up to whole rounds."""
        shares: np.ndarray = self.active / self.config.period
        return shares
