"""Strategies whose server has an optimizer, by hand: FedAdam, FedYogi, FedAdagrad, FedAvgM and FedAGM."""

import pytest
import torch
from hand import path, rule_of


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # For D = 1: m = 0.1, 0.19 and v = 1e-6 + 0.01, 1e-6 + 0.02.
        ("fedyogi", [0.990050, 0.990050 + 1.334036]),
        # m = D and v = 1e-6 + 1, 1e-6 + 2.
        ("fedadagrad", [0.999000, 0.999000 + 0.706607]),
    ],
)
def test_by_hand(name, steps):
    up, _ = path(rule_of(name, server_lr=1.0), [1, 1, None])
    assert up == pytest.approx([*steps, steps[-1]], abs=2e-6)
    down, _ = path(rule_of(name, server_lr=1.0), [-1, -1, None])
    assert down == pytest.approx([-v for v in up], rel=1e-12)


def test_yogi_falls_slower_than_adam():
    """After D = 10, 0.1 with b2 = 0.99: Adam has v = 0.99 v + 0.01 D^2, Yogi v - 0.01 D^2."""
    for name, second in (("fedadam", 0.99 * (1 + 0.99e-6) + 1e-4), ("fedyogi", 1 + 1e-6 - 1e-4)):
        rule = rule_of(name)
        path(rule, [10, 0.1])
        assert float(rule.state["second"]["w"]) == pytest.approx(second, rel=1e-9)


def test_fedadam_by_hand():
    """For D = 1 the first step is 0.1 / (sqrt(0.99e-6 + 0.01) + 0.001) = 0.990050 eta. D = 0 stays, and -D mirrors."""
    up, _ = path(rule_of("fedadam", server_lr=1.0), [1, 1, None, 0.5])
    assert up[0] == pytest.approx(0.990050, abs=1e-6)
    assert up[2] == up[1]
    down, _ = path(rule_of("fedadam", server_lr=1.0), [-1, -1, None, -0.5])
    assert down == pytest.approx([-v for v in up], rel=1e-12)
    assert path(rule_of("fedadam"), [0, 0, 0], start=3.0)[0] == [3, 3, 3]


def test_fedavgm_by_hand():
    """D = 1 each round and rho = 0.5 give 1, 2.5, 4.25. A round without replies changes nothing."""
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, 1, 1])[0] == [1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, None, 1, 1])[0] == [1, 1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.0, server_lr=0.5), [1, 1])[0] == [0.5, 1]


def test_fedagm_by_hand():
    """D = 1 and rho = 0.5 give W = 1, 2.5, 4.25. The broadcasts are 0, 1.5, 3.25, but W is evaluated."""
    strategy = rule_of("fedagm", server_momentum=0.5)
    models, sent = path(strategy, [1, 1, 1])
    assert models == [1, 2.5, 4.25]
    assert sent[:2] == [1.5, 3.25]
    assert strategy.broadcast_for_evaluation({"w": torch.tensor([4.25])})["model/w"].item() == 4.25


def test_fedagms_model_moves_by_the_momentum():
    """W_(t+1) = W_t + m_(t+1) exactly, with m from the broadcast W + rho m."""
    models, sent = path(rule_of("fedagm", server_momentum=0.5), [1, -2, None, 4])
    for before, after, ahead in zip([0.0, *models], models, sent, strict=False):
        if after != before:
            assert after == before + (ahead - after) / 0.5
    assert (models[2], sent[2]) == (models[1], sent[1])
