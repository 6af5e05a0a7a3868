"""Amplified SCAFFOLD: a period by hand, the authors' code written down, SCAFFOLD at its end, and the value of c."""

import numpy as np
import pytest
import torch
from helpers import PATTERN
from left import ABSENCES, digits_left, scalar_left


def run_authors_code(rounds, period, gamma, targets=(0.0, 6.0, 3.0), steps=2, lr=0.1, w=2.0):
    """Return W after each round of the scalar problem, by the updates of the authors' released script."""
    size = len(targets)
    control, total, count = np.zeros(size), np.zeros(size), np.zeros(size)
    c, anchor, path = 0.0, w, []
    for number, cohort in enumerate(rounds, 1):
        trained = []
        for k in cohort:
            own = w
            for _ in range(steps):
                gradient = own - targets[k]
                total[k] += gradient
                count[k] += 1
                own -= lr * (gradient - control[k] + c)
            trained.append(own)
        w = float(np.mean(trained)) if trained else w
        if number % period == 0:
            w = anchor = anchor + gamma * (w - anchor)
            control = np.where(count > 0, total / np.maximum(count, 1), control)
            c, total, count = control.mean(), np.zeros(size), np.zeros(size)
        path.append(w)
    return path


def test_two_periods_by_hand():
    """One client with target 1, one step of 0.1 a round, P = 2, gamma = 2.

    W = 0.1, then 0.19 that is amplified to 0.38. c_1 = -(1 + 0.9) / 2 = c. A lone client's correction is 0.
    """
    local = {"iterations": 1}
    run = scalar_left("amplified_scaffold", [[0]] * 3, start=0.0, targets=(1,), period=2, amplification=2.0, local=local)
    assert run.w == pytest.approx([0.1, 0.38, 0.38 + 0.1 * 0.62], rel=1e-6)
    assert float(run.strategy.state["control"]["classifier.w"]) == pytest.approx(-0.95, rel=1e-6)
    assert run.list_state_numbers("client_control/classifier.w") == pytest.approx([-0.95], rel=1e-6)
    assert run.list_state_numbers("period/steps") == [1]


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize("period", [2, 3])
def test_golden_run_is_the_authors_code(period, stack_size):
    rounds = [*PATTERN, [0, 1, 2], [1], [0, 2]]
    found = scalar_left("amplified_scaffold", rounds, stack_size=stack_size, period=period, amplification=1.5).w
    assert found == pytest.approx(run_authors_code(rounds, period, 1.5), rel=1e-6)


def test_periods_of_a_round_without_amplification_are_scaffold():
    own = scalar_left("amplified_scaffold", PATTERN, period=1, amplification=1.0).w
    assert own == pytest.approx(scalar_left("scaffold", PATTERN).w, rel=1e-6)


def test_c_is_the_mean_of_all_clients_c_k_whoever_took_part():
    run = digits_left("amplified_scaffold", ABSENCES[:4], stack_size=4, period=2, local={"lr": 0.02})
    for name, value in run.strategy.state["control"].items():
        total = sum(state[f"mean_gradient/{name}"] for state in run.client_state.values())
        torch.testing.assert_close(value, total / 8, rtol=1e-6, atol=1e-9)


def test_a_round_without_replies_ends_a_period():
    run = scalar_left("amplified_scaffold", [[0], [], [0]], targets=(1,), start=0.0, period=2, amplification=2.0)
    assert run.strategy.state["period"] == 1
    assert run.w[1] == pytest.approx(2 * run.w[0], rel=1e-6)
