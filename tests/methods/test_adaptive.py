"""FedYogi and FedAdagrad: by hand."""

import pytest
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
