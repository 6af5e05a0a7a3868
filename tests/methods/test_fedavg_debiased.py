"""Debiasing FedAvg: rates by hand, equal shares, and the mean that unequal participation does not move."""

import pytest
from helpers import FULL_COHORTS, PATTERN
from left import scalar_left


def test_rates_by_hand():
    """K = 2, B = 1 so far, one step of 0.1 from 0 towards 1 and 5. Client 0 alone twice: nu = 1/2. Both: 3 / (2 * 3), 3 / 2.

    W = 0.05, 0.05 + 0.05 * 0.95 = 0.0975, then + (0.1 * 1/2 * 0.9025 + 0.1 * 3/2 * 4.9025) / 2.
    """
    run = scalar_left("fedavg_debiased", [[0], [0], [0, 1]], start=0.0, targets=(1, 5), local={"iterations": 1})
    last = 0.0975 + 0.1 * (1 / 2 * 0.9025 + 3 / 2 * 4.9025) / 2
    assert run.w == pytest.approx([0.05, 0.0975, last], rel=1e-6)
    assert run.list_state_numbers("participation/count") == [3, 1]
    assert run.strategy.state["replies"] == 4


@pytest.mark.parametrize("stack_size", [1, 3])
def test_golden_run(stack_size):
    """Full cohorts give FedAvg's values. An empty round lowers B."""
    full = scalar_left("fedavg_debiased", FULL_COHORTS, stack_size=stack_size).w
    assert full == pytest.approx([2.190000, 2.343900, 2.468559, 2.569533, 2.651322], abs=1e-5)
    found = scalar_left("fedavg_debiased", PATTERN, stack_size=stack_size).w
    assert found == pytest.approx(run_equations(PATTERN), abs=1e-5)


def run_equations(rounds, targets=(0, 6, 3), steps=2, lr=0.1, w=2.0):
    """Return W after each round by the equations, with B the mean cohort of the rounds before."""
    counts, path = [0] * len(targets), []
    for t, cohort in enumerate(rounds, 1):
        mean = sum(counts) / (t - 1) if sum(counts) else len(cohort)
        for k in cohort:
            counts[k] += 1
        rates = {k: lr * t * mean / (counts[k] * len(targets)) for k in cohort}
        ends = [targets[k] + (w - targets[k]) * (1 - rates[k]) ** steps for k in cohort]
        w = sum(ends) / len(ends) if ends else w
        path.append(w)
    return path


def test_it_ends_near_the_middle_though_one_client_comes_three_times_as_often():
    """Targets 0 and 4: FedAvg ends near 1, the mean weighted by participation, and this at 2."""
    rounds, local = [[0], [0], [1], [0]] * 20, {"iterations": 1, "lr": 0.05}
    biased = scalar_left("fedavg", rounds, targets=(0, 4), local=local, weights="uniform").w
    own = scalar_left("fedavg_debiased", rounds, targets=(0, 4), local=local).w
    assert biased[-1] == pytest.approx(1, abs=0.1)
    assert own[-1] == pytest.approx(2, abs=0.1)
