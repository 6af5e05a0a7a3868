"""The weights that a server rule gives nodes over the rounds, also those that are away (PMFL, Figure 6)."""

from pathlib import Path

import numpy as np

from contrafed.analysis.cdf import node_values
from core.errors import UserError

METRIC = "weight_all"  # of nodes.csv with log=[weights]


def expected_weight(probability: float, cutoff: int) -> float:
    """Return (1 - (1 - p)^C) / p: the mean length of an interval that ends with a participation or after C rounds.

    PMFL's and FedAU's weights tend to it for a node that takes part with ``probability`` p in (0, 1] of each round's draws.
    """
    return (1 - (1 - probability) ** cutoff) / probability


def traces(folder: str | Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds (T,), nodes (K,) and weights (T, K) of a run with ``log=[weights]``, NaN where a node has none yet.

    Raises ``UserError`` for a run that logged none.
    """
    table = node_values(folder, METRIC)
    if table.empty:
        raise UserError(f"{folder} has no weights of all nodes; run it with log=[weights]")
    wide = table.pivot(index="round", columns="node", values="value")
    return wide.index.to_numpy(), wide.columns.to_numpy(), wide.to_numpy()


def mean_trace(folder: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Return rounds (T,) and the mean weight over the nodes that have one (T,)."""
    rounds, _, weights = traces(folder)
    return rounds, np.nanmean(weights, axis=1)
