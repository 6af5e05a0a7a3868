"""Compute the clients' weights in FedAU and PMFL: the mean length of a client's participation intervals, with a cutoff.

Source: Wang and Ji 2024 (FedAU, arXiv:2306.03401) and Zhang et al. 2026 (PMFL, arXiv:2602.11945), Algorithm 2 of each.
"""

import numpy as np


class Intervals:
    """Per client: rounds since the last interval ended (Q), number of ended intervals (R), and their mean length (x).

    An interval ends when the client participates, or after ``cutoff`` (C) rounds without participation.
    """

    def __init__(self, num_clients: int, cutoff: int, lag: bool, state: dict[str, np.ndarray]) -> None:
        """Keep the arrays in ``state``.

        Args:
            num_clients: K.
            cutoff: C.
            lag: Use an interval only in the round after its end (FedAU's code, with first weight 1). Otherwise use it at once
                (PMFL, Algorithm 2).
            state: The strategy's state.
        """
        self.cutoff, self.lag, self.state = cutoff, lag, state
        state["rounds_waited"] = np.zeros(num_clients, dtype=np.int64)
        state["num_intervals"] = np.zeros(num_clients, dtype=np.int64)
        state["mean_interval"] = np.ones(num_clients, dtype=np.float64)
        self.weights = np.full(num_clients, np.nan)  # (K,) of the last round, NaN before the first interval's end

    def tick(self, clients: np.ndarray) -> np.ndarray:
        """Process one round with the cohort ``clients`` (m,), and return its weights (m,)."""
        waited, ended, mean = self.state["rounds_waited"], self.state["num_intervals"], self.state["mean_interval"]
        before = mean.copy()
        waited += 1
        ends = waited >= self.cutoff
        ends[clients] = True
        ended[ends] += 1
        mean[ends] += (waited[ends] - mean[ends]) / ended[ends]
        waited[ends] = 0
        self.weights = before if self.lag else np.where(ended > 0, mean, np.nan)
        return self.weights[clients]
