"""How far apart the participants of a round pull (PMFL, Definition 1), and how far apart models are (MpFedcon, Figure 3)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from contrafed.core.tensors import Tensors, flat
from contrafed.core.weighted_sum import combine, squared_distance


def deviation(deltas: Sequence[Tensors]) -> tuple[float, float]:
    """Return Dev = sum_k (1 - cos(Delta_k, mean Delta)) over m participants' updates, and Dev / m; (0, 0) for none.

    The sum is the paper's, in [0, 2 m], and grows with m. The cosine with a zero vector counts 0.
    """
    if not deltas:
        return 0.0, 0.0
    mean = flat(combine(deltas, [1 / len(deltas)] * len(deltas)))
    cosines = [_cosine(flat({name: delta[name] for name in deltas[0]}).double(), mean) for delta in deltas]
    total = sum(1 - cosine for cosine in cosines)
    return total, total / len(deltas)


def _cosine(a: Tensor, b: Tensor) -> float:
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the mean squared difference of two models' parameters of the same names. Raises ``ValueError`` for others."""
    if a.keys() != b.keys():
        raise ValueError(f"one model alone has {min(a.keys() ^ b.keys())}")
    return squared_distance(a, b) / sum(value.numel() for value in a.values())
