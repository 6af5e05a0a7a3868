"""round_robin: a window of clients moves over all of them, and overlaps with the last round's."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.participation import Participation, Selection


@dataclass(frozen=True)
class Config(Selection):
    """Settings of the pattern."""

    active: Annotated[int, Range(ge=1)]  # clients that are available in a round
    step: Annotated[int, Range(ge=1)]  # clients by which the window moves


class RoundRobin(Participation):
    """Order the clients at random once. In round t those at places s to s + active - 1 are available, with s = (t - 1) step.

    Places are counted modulo K. With step = active no client is in two rounds in a row until all had their turn. With a smaller
    step active - step clients stay.

    Source: this project's design, after the round-robin schedules with overlap of decentralised learning.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the order.

        Raises:
            UserError: If the window has more clients than there are.
        """
        for key in ("active", "step"):
            if (value := getattr(self.config, key)) > self.num_clients:
                raise UserError(f"participation.{key}={value} is more than the {self.num_clients} clients that may train")
        self.place = generator(self.seed, "availability order").permutation(self.num_clients)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        first = (server_round - 1) * self.config.step
        here: np.ndarray = (self.place - first) % self.num_clients < self.config.active
        return here

    def presence(self) -> np.ndarray:
        """Return each client's share of the rounds of a cycle (K,)."""
        apart = math.gcd(self.num_clients, self.config.step)  # of the places at which a window starts
        starts = np.arange(0, self.num_clients, apart)
        counts = np.ceil((self.config.active - self.place % apart) / apart).clip(0)
        shares: np.ndarray = counts / len(starts)
        return shares
