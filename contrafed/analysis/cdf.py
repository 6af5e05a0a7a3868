"""How a number is spread over nodes: empirical distributions (PMFL, Figure 5) and gains (MpFedcon, Figure 9)."""

from collections.abc import Mapping

import numpy as np


def ecdf(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values in order (v,), and F (v,): the share of all ``values`` (n,) that are at most so large.

    Raises ``ValueError`` for none, or one that is not finite.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size or not np.isfinite(values).all():
        raise ValueError("a distribution needs finite values")
    found, counts = np.unique(values, return_counts=True)
    return found, counts.cumsum() / values.size


def gains(ours: Mapping[int, float], alone: Mapping[int, float]) -> dict[int, float]:
    """Return by how much each node's accuracy in ``ours`` exceeds that in ``alone``, both by node, of the nodes in both.

    MpFedcon, Figure 9: a method against SOLO (``strategy=local``).
    """
    return {node: ours[node] - alone[node] for node in sorted(ours.keys() & alone.keys())}


def gaining(found: Mapping[int, float]) -> float:
    """Return the share of nodes whose gain is above 0. Raises ``ValueError`` without nodes."""
    if not found:
        raise ValueError("no nodes")
    return sum(value > 0 for value in found.values()) / len(found)
