"""The weight that FedAU and PMFL give a node: the mean length of its participation intervals, with a cutoff.

Source: Wang and Ji 2024 (FedAU, arXiv:2306.03401) and Zhang et al. 2026 (PMFL, arXiv:2602.11945), Algorithm 2 of each.
"""

import numpy as np


class Intervals:
    """Per node: rounds since the last interval ended (Q), how many intervals ended (R), and their mean (x).

    An interval ends when the node takes part, or when it has been away for ``cutoff`` (C) rounds.
    """

    def __init__(self, num_nodes: int, cutoff: int, lag: bool, state: dict[str, np.ndarray]) -> None:
        """Keep the arrays in ``state``. With ``lag`` the interval that ends now counts only from the next time on
        (FedAU's code, weight 1 at first); without, it counts at once (PMFL, Algorithm 2).
        """
        self.cutoff, self.lag, self.state = cutoff, lag, state
        state["waited"] = np.zeros(num_nodes, dtype=np.int64)
        state["ended"] = np.zeros(num_nodes, dtype=np.int64)
        state["mean"] = np.ones(num_nodes, dtype=np.float64)
        self.weights = np.full(num_nodes, np.nan)  # (K,) of the last round; NaN where no interval has ended

    def tick(self, nodes: np.ndarray) -> np.ndarray:
        """Pass one round in which ``nodes`` (m,) took part; return their weights (m,)."""
        waited, ended, mean = self.state["waited"], self.state["ended"], self.state["mean"]
        before = mean.copy()
        waited += 1
        ends = waited >= self.cutoff
        ends[nodes] = True
        ended[ends] += 1
        mean[ends] += (waited[ends] - mean[ends]) / ended[ends]
        waited[ends] = 0
        self.weights = before if self.lag else np.where(ended > 0, mean, np.nan)
        return self.weights[nodes]
