"""Summaries of a curve of evaluation points."""

from collections.abc import Sequence


def top_k_mean(values: Sequence[float], k: int = 5) -> float:
    """Return the mean of the ``k`` largest values, of all when there are fewer (PMFL's reported number); NaN for none."""
    best = sorted(values, reverse=True)[:k]
    return sum(best) / len(best) if best else float("nan")


def ema(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Return e_0 = a_0, e_t = decay e_{t-1} + (1 - decay) a_t (FedRCL's reported curve)."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else decay * out[-1] + (1 - decay) * value)
    return out
