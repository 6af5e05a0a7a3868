"""Summaries of a curve of evaluation points."""

from collections.abc import Sequence


def top_k_mean(values: Sequence[float], k: int = 5) -> float:
    """Return the mean of the ``k`` largest values, of all when there are fewer (PMFL's reported number); NaN for none."""
    best = sorted(values, reverse=True)[:k]
    return sum(best) / len(best) if best else float("nan")


def ema(points: Sequence[tuple[int, float]], decay: float) -> dict[int, float]:
    """Return the average e_t of points (t, a_t) by round: the first a_t, then decay e_{t-1} + (1 - decay) a_t.

    FedRCL's reported curve, with a decay of 0.9 a round. Where rounds lie between two points it forgets as often.
    """
    out: dict[int, float] = {}
    last = None
    for t, value in points:
        kept = 0.0 if last is None else decay ** (t - last)
        out[t] = value if last is None else kept * out[last] + (1 - kept) * value
        last = t
    return out


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and the up to ``window`` - 1 before it; for drawn curves, never for reported numbers."""
    tails = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(tail) / len(tail) for tail in tails]
