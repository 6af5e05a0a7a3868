"""lognormal: speeds that are drawn once for each client, and optionally a factor in each round."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.clock import Clock, Speeds


@dataclass(frozen=True)
class Config:
    """Settings of the clock: medians, and standard deviations of logarithms."""

    step_seconds: Annotated[float, Range(gt=0)]
    step_sigma: Annotated[float, Range(ge=0, le=10)]
    bandwidth_down: Annotated[float, Range(gt=0)]
    bandwidth_up: Annotated[float, Range(gt=0)]
    bandwidth_sigma: Annotated[float, Range(ge=0, le=10)]
    round_sigma: Annotated[float, Range(ge=0, le=10)]


class Lognormal(Clock):
    """Draw client k's seconds of a step as m exp(sigma z_k), z_k ~ N(0, 1), with the median m.

    Its bandwidths down and up have one other such factor. In a round a client takes exp(round_sigma z_kt) times as long, for
    steps and for bytes.
    """

    def prepare(self) -> None:
        """Draw the factors of all clients."""
        config = self.config
        self.step = config.step_seconds * self._factors("step seconds", config.step_sigma)
        self.network = self._factors("bandwidth", config.bandwidth_sigma)
        self.last = 0, np.ones(0)  # the last round, and the factors of all clients in it

    def speeds(self, clients: np.ndarray, server_round: int) -> Speeds:
        """Return the speeds of ``clients`` (m,) in a round."""
        config, slower = self.config, 1.0 if not self.config.round_sigma else self._in_round(server_round)[clients]
        network = self.network[clients] / slower
        return Speeds(self.step[clients] * slower, config.bandwidth_down * network, config.bandwidth_up * network)

    def _in_round(self, server_round: int) -> np.ndarray:
        if self.last[0] != server_round:
            self.last = server_round, self._factors("round seconds", self.config.round_sigma, server_round)
        return self.last[1]

    def _factors(self, purpose: str, sigma: float, server_round: int = 0) -> np.ndarray:
        """Return a lognormal factor for each client (K,), with a median of 1. Client k's does not depend on K."""
        factors: np.ndarray = np.exp(sigma * generator(self.seed, purpose, server_round).standard_normal(self.num_clients))
        return factors
