"""FedAU: intervals by hand, the golden run, and equality to FedAvg under full participation."""

import numpy as np
import pytest
from helpers import slow

from contrafed.server.intervals import Intervals


def weights_along(path, cutoff, lag):
    """Return one client's weight in each round of its participation."""
    intervals = Intervals(1, cutoff, lag, {})
    weights = []
    for here in path:
        got = intervals.tick(np.array([0] if here else [], dtype=np.int64))
        if here:
            weights.append(float(got[0]))
    return weights


def test_interval_weights_by_hand():
    """P6 and P7."""
    path = [1, 0, 0, 1, 0, 0, 0, 1]
    assert weights_along(path, 50, False) == pytest.approx([1, 2, 8 / 3])
    assert weights_along(path, 3, False) == pytest.approx([1, 2, 2])
    assert weights_along(path, 50, True) == pytest.approx([1, 1, 2])
    assert weights_along(path, 3, True) == pytest.approx([1, 1, 7 / 3])
    assert weights_along([0, 0, 1, 1, 0], 50, False) == pytest.approx([3, 2])
    assert weights_along([1, 0, 1, 1, 0, 0, 1], 1, True) == pytest.approx([1] * 4)  # FedAU, C = 1: average_all


def test_interval_weights_approach_one_over_p():
    # Every fourth round: omega -> 4.
    assert weights_along([0, 0, 0, 1] * 50, 50, True)[-1] == pytest.approx(4)
    path = np.random.default_rng(0).random(40_000) < 0.1
    # (1 - (1 - p)^C) / p = 9.9485 for p = 0.1, C = 50
    assert weights_along(path, 50, False)[-1] == pytest.approx(9.9485, rel=0.03)


@pytest.mark.parametrize(("p", "share"), [(0.02, 0.636), slow(0.1, 0.995), slow(0.402, 1.0)])
@pytest.mark.parametrize("lag", [False, slow(True)])
def test_a_client_counts_as_if_it_were_always_there(p, share, lag):
    """P13: a client's weights over all rounds sum to their number. The cutoff leaves 1 - (1 - p)^C of it for rare clients."""
    path = np.random.default_rng(1).random(100_000) < p
    assert sum(weights_along(path, 50, lag)) / len(path) == pytest.approx(share, rel=0.03)
