"""sine: client k's probability goes up and down with the rounds, such as by day and night."""

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

    period: Annotated[int, Range(ge=1)]  # P, rounds
    amplitude: Annotated[float, Range(ge=0, le=0.5)]  # gamma
    zones: Annotated[int, Range(ge=1)]


class Sine(Participation):
    """Draw the availability A_k^t ~ Bernoulli(p_k (1 - gamma + gamma sin(2 pi (t / P + z_k / Z)))).

    z_k is the client's zone of Z zones, drawn uniformly. With one zone all clients have their best round together. With
    gamma = 1/2 the probability goes from 0 to p_k.

    Source: the sine of FedAWE's non-stationary availability (Xiang et al. 2024). Zones are this project's design.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Draw the probabilities and the zones."""
        self.probabilities = self.p = probabilities(self.config, class_proportions, self.num_clients, self.seed)
        self.zones = generator(self.seed, "availability zones").integers(0, self.config.zones, self.num_clients)

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        config, t = self.config, server_round - 1
        wave = np.sin(2 * np.pi * (t / config.period + self.zones / config.zones))
        now = self.p * (1 - config.amplitude + config.amplitude * wave)
        here: np.ndarray = generator(self.seed, "availability", t).random(self.num_clients) < now
        return here

    def presence(self) -> np.ndarray:
        """Return the mean over a period (K,): (1 - gamma) p_k. With a period of one or two rounds it is exact for the zone."""
        steps = np.arange(self.config.period)[:, None] / self.config.period
        wave = np.sin(2 * np.pi * (steps + self.zones / self.config.zones)).mean(0)
        mean: np.ndarray = self.p * (1 - self.config.amplitude + self.config.amplitude * wave)
        return mean
