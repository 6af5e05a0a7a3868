"""FedStale: by hand, and equal to FedAvg and FedVARP at its ends."""

import pytest
from hand import GOLDEN
from helpers import PATTERN, run_scalar


@pytest.mark.parametrize(("weight", "other"), [(0.0, "fedavg"), (1.0, "fedvarp")])
def test_its_ends_are_fedavg_and_fedvarp(weight, other):
    found = run_scalar("fedavg", PATTERN, server="fedstale", stale_weight=weight, weights="uniform")
    assert found == pytest.approx(GOLDEN[other][2], abs=1e-5)
