"""Measure how far the updates of a round diverge (PMFL, Definition 1), and how far apart models are (MpFedcon, Figure 3)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from contrafed.core.tensors import Tensors, flat
from contrafed.core.weighted_sum import squared_distance, weighted_sum


def deviation(deltas: Sequence[Tensors]) -> tuple[float, float]:
    """Compute Dev = sum_k (1 - cos(Delta_k, mean Delta)) over the updates of m clients.

    The sum is the paper's. It is in [0, 2 m] and grows with m. The cosine with a zero vector is taken as 0.

    Args:
        deltas: The updates Delta_k.

    Returns:
        Dev and Dev / m, or (0, 0) without updates.
    """
    if not deltas:
        return 0.0, 0.0
    mean = flat(weighted_sum(deltas, [1 / len(deltas)] * len(deltas)))
    cosines = [_cosine(flat({name: delta[name] for name in deltas[0]}).double(), mean) for delta in deltas]
    total = sum(1 - cosine for cosine in cosines)
    return total, total / len(deltas)


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Compute the mean squared difference of two models' parameters.

    Raises:
        ValueError: If the models' names differ.
    """
    if a.keys() != b.keys():
        raise ValueError(f"one model alone has {min(a.keys() ^ b.keys())}")
    return squared_distance(a, b) / sum(value.numel() for value in a.values())
