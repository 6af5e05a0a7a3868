"""Compute a report's statistics: over seeds, over rounds, and between two rankings of the same methods."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

Points = Sequence[tuple[int, float]]


def over_seeds(values: Sequence[float]) -> tuple[float, float]:
    """Compute mean and sample standard deviation (n - 1) of one number per seed. A single seed has standard deviation NaN.

    The standard deviation over clients is another number, the population's. Each round's is in ``metrics.csv`` as
    ``accuracy_std``, and FedCRL's tables have its mean over seeds.
    """
    known = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(known)) if known else math.nan
    return mean, float(np.std(known, ddof=1)) if len(known) > 1 else math.nan


def ranks(values: Sequence[float], *, higher_is_better: bool = True) -> list[float]:
    """Return the rank of each value, 1 for the best. Equal values share the mean of their ranks, and NaN has rank NaN."""
    numbers = np.asarray(values, float)
    ranked = stats.rankdata(-numbers if higher_is_better else numbers, method="average", nan_policy="omit")
    return [float(rank) for rank in ranked]


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, int]:
    """Compute Spearman's correlation of two equally long columns, and the number of cells that both have.

    It is NaN below three cells, because any order of two would agree or disagree completely, and if one side has only one
    value.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not (math.isnan(a) or math.isnan(b))]
    if len(pairs) < 3 or any(len(set(column)) == 1 for column in zip(*pairs, strict=True)):
        return math.nan, len(pairs)
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic), len(pairs)


def first_at(points: Points, target: float) -> int | None:
    """Return the first round (from 1) whose value reaches the target, None if none does ("-" in tables).

    The tolerance is 1e-9, because a mean over seeds with equal ends may be slightly above each.
    """
    return next((t for t, value in points if t >= 1 and value >= target * (1 - 1e-9)), None)


def band(series: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds, and for each the mean and the sample standard deviation over seeds (0 for one seed).

    Only rounds that every series has are used, so that no step in the mean comes from a seed that ends earlier.
    """
    tables = [dict(points) for points in series]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables])
    deviation = values.std(axis=0, ddof=1) if len(tables) > 1 else np.zeros(len(rounds))
    return np.array(rounds), values.mean(axis=0) if len(tables) else np.zeros(0), deviation
