"""Every number of a report by hand: over seeds, over clients, over rounds, and between two orders."""

import math

import numpy as np
import pytest

from contrafed.report.statistics import band, first_at, over_seeds, ranks, spearman
from contrafed.runs.output.series import summary_of_curves

NAN = float("nan")


def test_over_seeds_is_the_sample_deviation():
    assert over_seeds([1, 3]) == pytest.approx((2, math.sqrt(2)))
    assert over_seeds([1, 2, 3, NAN]) == pytest.approx((2, 1))
    mean, deviation = over_seeds([5])
    assert (mean, math.isnan(deviation)) == (5, True)
    assert all(math.isnan(value) for value in over_seeds([]))


def test_over_nodes_is_the_population_deviation_of_the_best_round():
    # Clients with (correct, total) of (9, 10), (30, 90): micro 0.39, std 0.2833. A later round is worse.
    accuracies = np.array([9 / 10, 30 / 90])
    curves = {
        ("personal", "test", "accuracy"): [(1, 39 / 100), (2, 0.3)],
        ("personal", "test", "accuracy_std"): [(1, float(accuracies.std())), (2, 0.1)],
    }
    summary = summary_of_curves(curves)
    assert summary["personal_accuracy_best"] == pytest.approx(0.39)
    assert summary["personal_accuracy_best_std"] == pytest.approx(0.2833333)
    assert summary["personal_accuracy_std"] == 0.1
    # Two seeds with a std of 0.2 and 0.4 over clients: a table has their mean, not their own std.
    assert over_seeds([0.2, 0.4])[0] == pytest.approx(0.3)


def test_ranks_share_ties():
    assert ranks([90, 95, 90, 80]) == [2.5, 1, 2.5, 4]
    assert ranks([116, 54, 200], higher_is_better=False) == [2, 1, 3]
    assert ranks([7, NAN, 9])[::2] == [2, 1]
    assert math.isnan(ranks([7, NAN, 9])[1])


def test_spearman_by_hand():
    # Ranks 1 2 3 4 against 1 3 2 4: 1 - 6 (0 + 1 + 1 + 0) / (4 * 15) = 0.8.
    assert spearman([1, 2, 3, 400], [1000, 3000, 2000, 3001]) == (pytest.approx(0.8), 4)
    # A tie has ranks 1.5 1.5 3 against 1 2 3. The covariance is 1.5, and the stds are sqrt(1.5 * 2).
    assert spearman([5, 5, 9], [1, 2, 3]) == (pytest.approx(1.5 / math.sqrt(3)), 3)
    assert spearman([1, 2, NAN, 4], [3, NAN, 1, 1])[1] == 2
    assert math.isnan(spearman([1, 2], [2, 1])[0])
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3])[0])


def test_first_round_at_a_target():
    points = [(0, 0.9), (10, 0.3), (20, 0.6), (30, 0.5), (40, 0.7)]
    assert first_at(points, 0.6) == 20
    assert first_at(points, 0.61) == 40
    assert first_at(points, 0.71) is None  # the initial model is left out


def test_band_over_seeds():
    rounds, mean, deviation = band([[(10, 1.0), (20, 2.0)], [(10, 3.0), (20, 2.0), (30, 9.0)]])
    assert rounds.tolist() == [10, 20]  # the second seed alone has round 30
    assert mean.tolist() == [2, 2]
    assert deviation.tolist() == [pytest.approx(math.sqrt(2)), 0]
    assert band([[(1, 5.0)]])[2].tolist() == [0]
