"""Summaries of a curve of evaluation points."""

from collections.abc import Sequence


def top_k_mean(values: Sequence[float], k: int = 5) -> float:
    """Return the mean of the ``k`` largest values, of all when there are fewer (PMFL's reported number); NaN for none."""
    best = sorted(values, reverse=True)[:k]
    return sum(best) / len(best) if best else float("nan")


def ema(values: Sequence[float], decay: float) -> list[float]:
    """Return e_0 = a_0, e_t = decay e_{t-1} + (1 - decay) a_t (FedRCL's reported curve; its decay is 0.9)."""
    out: list[float] = []
    for value in values:
        out.append(value if not out else decay * out[-1] + (1 - decay) * value)
    return out


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the up to ``window`` - 1 before it; for drawn curves, never for reported numbers."""
    tails = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(tail) / len(tail) for tail in tails]
