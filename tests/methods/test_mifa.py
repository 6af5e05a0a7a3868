"""MIFA: two clients by hand, the golden problem, decaying rates, and equality to FedAvg under full participation."""

import pytest
from hand import path, rule_of
from helpers import PATTERN, run_scalar


def test_before_anybody_came_nothing_moves():
    assert path(rule_of("mifa", (4, 4)), [None, None])[0] == [0, 0]


@pytest.mark.parametrize("stack_size", [1, 3])
def test_a_decaying_rate_scales_old_updates_too(stack_size):
    """The table holds Delta / eta_t, and the step has this round's eta."""
    golden = [2.126667, 2.189217, 2.229472, 2.249599, 2.259286]
    assert run_scalar("mifa", PATTERN, stack_size=stack_size, local={"lr_decay": 0.5}) == pytest.approx(golden, abs=1e-5)


def test_at_a_constant_rate_it_does_not_matter_what_is_stored():
    updates = [{0: 1.0, 2: -3.0}, None, {1: 0.5}, {0: 2.0}]
    slow, fast = (path(rule_of("mifa", (4, 4, 4), local={"lr": lr}), updates)[0] for lr in (0.001, 0.9))
    assert slow == pytest.approx(fast, rel=1e-12)
