"""Compute a report's statistics: over seeds, over rounds, and between two rankings of the same methods."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from contrafed.runs.output.series import Points

ALPHA = 0.05  # two-sided significance level of every test and interval
POWER = 0.8  # with which a difference is to be found
MAX_SEEDS = 10_000  # more are not counted
DIGITS = 9  # to which means are compared: those of equal sums may differ beyond
KEPT_ERROR = 6e-7  # of a kept accuracy: earlier versions kept six digits
SAME = 2 * 100 * KEPT_ERROR  # points, up to which two differences are equal
MAX_SHIFT = 30  # of Student's t, from which on a difference is found for sure


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
    numbers = np.round(np.asarray(values, float), DIGITS)
    ranked = stats.rankdata(-numbers if higher_is_better else numbers, method="average", nan_policy="omit")
    return [float(rank) for rank in ranked]


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, int]:
    """Compute Spearman's correlation of two equally long columns, and the number of cells that both have.

    It is NaN below three cells, because any order of two would agree or disagree completely, and if one side has only one
    value.
    """
    pairs = [pair for pair in zip(*np.round([ours, theirs], DIGITS).tolist(), strict=True) if not any(map(math.isnan, pair))]
    if len(pairs) < 3 or any(len(set(column)) == 1 for column in zip(*pairs, strict=True)):
        return math.nan, len(pairs)
    return float(stats.spearmanr(*zip(*pairs, strict=True)).statistic), len(pairs)


def first_at(points: Points, target: float) -> int | None:
    """Return the first round (from 1) whose value reaches the target, None if none does ("-" in tables).

    A value is rounded where it was kept, and a mean over seeds with equal ends may be slightly above each. So the tolerance is
    ``KEPT_ERROR``.
    """
    return next((t for t, value in points if t >= 1 and value >= target - KEPT_ERROR), None)


def band(series: Sequence[Points]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rounds, and for each the mean and the sample standard deviation over seeds (0 for one seed).

    Only rounds that every series has are used, so that no step in the mean comes from a seed that ends earlier.
    """
    tables = [dict(points) for points in series]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = np.array([[table[t] for t in rounds] for table in tables])
    deviation = values.std(axis=0, ddof=1) if len(tables) > 1 else np.zeros(len(rounds))
    return np.array(rounds), values.mean(axis=0) if len(tables) else np.zeros(0), deviation


@dataclass(frozen=True)
class PairedDifference:
    """The mean of paired differences with its 95 % interval and p value. NaN stands for a value that needs more pairs.

    If all differences are equal, but not 0, they have neither. Accuracies are multiples of 1 / images, so two or three
    differences are equal by chance.

    ``seeds``: how many a difference of one point needs (``count_seeds``), NaN if that is unknown.
    """

    n: int
    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    seeds: float = math.nan

    @property
    def is_tie(self) -> bool:
        """Whether the two sides cannot be told apart: the interval has 0 in it, or every pair is equal."""
        return self.mean == 0 or self.low <= 0 <= self.high


def compare_pairs(ours: Sequence[float], theirs: Sequence[float], comparisons: int = 1) -> PairedDifference:
    """Compare two methods by the pairs that both have, with a paired t test.

    Args:
        ours: One value a seed, in points. NaN is a seed without one.
        theirs: The values of the other method for the same seeds, in the same order.
        comparisons: How many such intervals hold at once, by Bonferroni's correction.
    """
    differences = np.subtract(np.asarray(ours, float), np.asarray(theirs, float))
    differences = differences[~np.isnan(differences)]
    n, mean = len(differences), float(differences.mean()) if len(differences) else math.nan
    if n < 2:
        return PairedDifference(n, mean)
    std = float(differences.std(ddof=1))
    if std < SAME:  # equal differences do not say how much others would vary
        return PairedDifference(n, mean) if abs(mean) > SAME else PairedDifference(n, 0.0, 0.0, 0.0, 1.0)
    test = stats.ttest_rel(differences, np.zeros(n))
    interval = test.confidence_interval(1 - ALPHA / comparisons)
    p = min(1.0, comparisons * float(test.pvalue))
    return PairedDifference(n, mean, float(interval.low), float(interval.high), p, count_seeds(std))


def count_seeds(std: float, difference: float = 1.0) -> float:
    """Return the number of seeds with which a paired t test finds a difference in ``POWER`` of all cases.

    Args:
        std: Sample standard deviation of the paired differences, in points.
        difference: The difference to find, in points.

    Returns:
        At least 2; infinity above ``MAX_SEEDS``.
    """
    if std == 0:
        return 2.0

    def compute_power(n: int) -> float:
        shift = difference / std * math.sqrt(n)
        return 1.0 if shift > MAX_SHIFT else float(stats.nct.sf(stats.t.ppf(1 - ALPHA / 2, n - 1), n - 1, shift))

    found = 2 + bisect.bisect_left(range(2, MAX_SEEDS + 1), POWER, key=compute_power)
    return float(found) if found <= MAX_SEEDS else math.inf


def correct_holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number (Holm 1979); NaN is no comparison and stays NaN."""
    known = [value for value in values if not math.isnan(value)]
    corrected, highest = dict[float, float](), 0.0
    for place, value in enumerate(sorted(known)):
        highest = max(highest, min(1.0, (len(known) - place) * value))
        corrected.setdefault(value, highest)
    return [corrected.get(value, math.nan) for value in values]


@dataclass(frozen=True)
class Ranking:
    """Methods by their mean rank over settings, the best first, and whether the ranks differ (Demsar 2006).

    ``critical_difference``: two mean ranks that are further apart differ significantly (Nemenyi).
    """

    ranks: dict[str, float]
    num_settings: int
    friedman: float
    p: float
    critical_difference: float

    @property
    def cliques(self) -> list[tuple[float, float]]:
        """The lowest and the highest mean rank of each largest group whose methods do not differ significantly."""
        ranks, found = sorted(self.ranks.values()), list[tuple[float, float]]()
        for number, low in enumerate(ranks):
            last = bisect.bisect_right(ranks, low + self.critical_difference) - 1
            if last > number and not (found and found[-1][1] >= ranks[last]):
                found.append((low, ranks[last]))
        return found


def rank_methods(values: dict[str, Sequence[float]]) -> Ranking | None:
    """Rank methods over settings, with Friedman's test and Nemenyi's critical difference at ``ALPHA``.

    Args:
        values: {method: one value a setting}, higher is better. All are of one length, without NaN.

    Returns:
        The ranking, or None for fewer than three methods or two settings, for which there is no such test.
    """
    columns = np.round(np.array(list(values.values()), float), DIGITS)
    if len(values) < 3 or columns.shape[1] < 2:
        return None
    k, n = columns.shape
    mean_ranks = stats.rankdata(-columns, axis=0).mean(axis=1)
    ranks = dict(sorted(zip(values, mean_ranks.tolist(), strict=True), key=lambda item: item[1]))
    quantile = float(stats.studentized_range.ppf(1 - ALPHA, k, math.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(k * (k + 1) / (6 * n))
    if (columns == columns[0]).all():  # the statistic would be 0 / 0
        return Ranking(ranks, n, 0.0, 1.0, critical)
    test = stats.friedmanchisquare(*columns)
    return Ranking(ranks, n, float(test.statistic), float(test.pvalue), critical)
