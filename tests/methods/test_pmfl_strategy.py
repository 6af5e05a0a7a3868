"""PMFL's strategy by hand: the weighted step, and the ways to use older models."""

import numpy as np
import pytest
import torch
from hand import rule_of

from contrafed.server.base import Round
from contrafed.server.replies import Replies, Reply


def server(config_changes, num_clients=4, num_rounds=5):
    """Return the strategy without a network."""
    rule = rule_of("pmfl", [1] * num_clients, **config_changes)
    rule.planned.count = num_rounds
    return rule


def aggregate(strategy, t, w, deltas):
    strategy.round = Round(t + 1, np.zeros(0, dtype=np.int64))
    replies = Replies(Reply(k, {"delta/w": torch.tensor([d])}, 1, {}) for k, d in deltas.items())
    return float(strategy.aggregate({"w": torch.tensor([float(w)], dtype=torch.float64)}, replies)["w"])


def test_server_rule_by_hand():
    """P10: K = 4, Delta_1 = 1 with x = 4, Delta_2 = -2 with x = 1: W + (4 - 2)/4. The paper's literal formula: W - 2."""
    for changes, expected in (
        ({}, 10.5),
        ({"sign": "paper", "normalize": "none"}, 8.0),
        ({"normalize": "participants"}, 11.0),
        ({"normalize": "weights"}, 10.4),
        ({"adaptive_weights": False}, 9.5),
    ):
        rule = server({"history_size": 0, **changes})
        for t in range(3):
            aggregate(rule, t, 10.0, {1: 0.0})
        assert aggregate(rule, 3, 10.0, {0: 1.0, 1: -2.0}) == pytest.approx(expected), changes


def test_history_by_hand():
    """P9: W^{t-1} = 2, W^{t-2} = 4, W^t = 6, mean update 1, psi = 0.5, H = 3: 0.5 * 7 + 0.25 * (2 + 4) = 5."""
    rule = server({"history_size": 3}, num_clients=1, num_rounds=10**9)  # psi stays 0.5 to nine digits
    aggregate(rule, 0, 4.0, {})
    aggregate(rule, 1, 2.0, {})
    rule.state["mean_interval"][:], rule.state["num_intervals"][:], rule.state["rounds_waited"][:] = 1, 1, 0
    assert aggregate(rule, 2, 6.0, {0: 1.0}) == pytest.approx(5.0, abs=1e-6)


def test_history_coefficient():
    """P8: T = 5 gives 0.5, 0.375, 0.25, 0.125, 0, measured by an update of 0 onto a history of 1."""
    got = []
    for t in range(5):
        rule = server({"history_size": 2}, num_rounds=5)
        rule.state["history"] = [{"w": torch.tensor([1.0], dtype=torch.float64)}]
        got.append(aggregate(rule, t, 0.0, {}))
    assert got == pytest.approx([0.5, 0.375, 0.25, 0.125, 0])
    for share, expected in (("rising", [0, 0.125, 0.25, 0.375, 0.5]), (0.3, [0.3] * 5)):
        got = []
        for t in range(5):
            rule = server({"history_size": 2, "history_share": share}, num_rounds=5)
            rule.state["history"] = [{"w": torch.tensor([1.0], dtype=torch.float64)}]
            got.append(aggregate(rule, t, 0.0, {}))
        assert got == pytest.approx(expected)
    single = server({"history_size": 2}, num_rounds=1)
    single.state["history"] = [{"w": torch.tensor([1.0])}]
    assert aggregate(single, 0, 0.0, {}) == 0.0  # T = 1 divides by zero in the paper: psi = 0


@pytest.mark.parametrize(
    ("step", "models"),
    [
        ("mixed", [1.0, 0.5 * 2 + 0.5 * 0, 0.5 * 2 + 0.5 * 1]),
        ("outside", [1.0, 0.5 * 1 + 1 + 0.5 * 0, 0.5 * 1.5 + 1 + 0.5 * 1]),
        ("unmixed", [1.0, 0.5 * 2 + 0.5 * 0, 0.5 * 3 + 0.5 * 1]),  # U is 1, 2, 3
    ],
)
def test_where_the_next_step_starts(step, models):
    """One client moves by 1 in each round. H = 2 and psi = 1/2, so that one older model is mixed in."""
    rule, model = server({"history_size": 2, "history_share": 0.5, "history_step": step}, num_clients=1), 0.0
    for t, expected in enumerate(models):
        model = aggregate(rule, t, model, {0: 1.0})
        assert model == pytest.approx(expected)


def test_history_warmup():
    """H = 4, psi = 1/2, models 8 and then 0: with one older model, 8, and then with two, 0 and 8."""
    # ``available`` takes their mean, ``wait`` none before there are three, and ``pad`` the first model, 8, for missing ones.
    for warmup, second, third in (("available", 8 / 2, (0 + 8) / 2 / 2), ("wait", 0, 0), ("pad", 8 / 2, (0 + 8 + 8) / 3 / 2)):
        rule = server({"history_size": 4, "history_warmup": warmup}, num_rounds=10**9)
        assert aggregate(rule, 0, 8.0, {}) == pytest.approx(8.0)
        assert aggregate(rule, 1, 0.0, {}) == pytest.approx(second, abs=1e-6), warmup
        assert aggregate(rule, 2, 0.0, {}) == pytest.approx(third, abs=1e-6), warmup


def test_constant_history_stays():
    """P11: without updates, a constant history leaves W unchanged for any psi."""
    rule = server({"history_size": 5}, num_rounds=7)
    for t in range(7):
        assert aggregate(rule, t, 3.0, {}) == pytest.approx(3.0, rel=1e-15)


@pytest.mark.parametrize(("half", "size", "drift"), [(0, 3, 0.285714), (0, 5, 0.222222), (1, 3, 0.545455)])
def test_history_shortens_the_way(half, size, drift):
    """An update of 1 in every round moves W by (1 - psi) / (1 + psi H / 2) a round. psi is 1/2, and 1/4 half way."""
    rule, model = server({"history_size": size}, num_clients=1, num_rounds=10**9), [0.0]
    for t in range(60):
        model.append(aggregate(rule, half * 5 * 10**8 + t, model[-1], {0: 1.0}))
    assert model[-1] - model[-2] == pytest.approx(drift, abs=1e-6)


def test_history_of_one_is_off():
    rule = server({"history_size": 1})
    aggregate(rule, 0, 100.0, {})
    assert aggregate(rule, 1, 0.0, {}) == 0.0
