"""cyclic: client k is available for the first share p_k of a cycle that starts at its own random offset."""

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
        """Raise ``UserError`` if the period has no room for FedAU's active and inactive round."""
        super().__post_init__()
        if self.variant == "fedau" and self.period < 2:
            raise UserError(f"participation.period must be >= 2 for variant=fedau, got {self.period}")


class Cyclic(Participation):
    """Client k is available, A_k^t = 1, iff (t - o_k) mod period < period p_k.

    That is ceil(period p_k) rounds of each cycle.

    With ``variant: fedau`` there are max(1, round(period p_k)) active rounds and at least one inactive one. The offset o_k is
    then uniform over 0 .. inactive rounds - 1. A client waits o_k rounds, and its first active window is complete.

    Source: PMFL section VI.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities and the offsets."""
        self.probabilities = probabilities(self.config, class_proportions, self.num_clients, self.seed)
        period = self.config.period
        if self.config.variant == "pmfl":
            # 100 * 0.07 exceeds 7 by rounding. The tolerance is relative, so that a tiny p_k keeps its one round.
            self.active = np.ceil(period * self.probabilities * (1 - 1e-12)).astype(np.int64)
            first: int | np.ndarray = period
        else:
            self.active = np.clip(np.rint(period * self.probabilities).astype(np.int64), 1, period - 1)
            first = period - self.active
        self.offsets = generator(self.seed, "availability offsets").integers(0, first, self.num_clients)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        here: np.ndarray = (server_round - 1 - self.offsets) % self.config.period < self.active
        return here

    def presence(self) -> np.ndarray:
        """Return the active share of a cycle (K,), which is p_k rounded to complete rounds."""
        shares: np.ndarray = self.active / self.config.period
        return shares
