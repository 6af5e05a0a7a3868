"""FedStale: by hand, and equal to FedAvg and FedVARP at its ends."""

import pytest
from hand import GOLDEN, PATTERN, path, rule_of
from helpers import run_scalar


def test_two_clients_by_hand():
    """S = {1}, {2}, {1} with Delta = 1, 3, 2 and beta 1/2: v = 1, 3 + 0.25, (2 - 0.5) + 0.5 (1 + 3) / 2."""
    models, _ = path(rule_of("fedstale", (4, 4), stale_weight=0.5), [{0: 1}, {1: 3}, None, {0: 2}])
    assert models == pytest.approx([1, 4.25, 4.25, 6.75], rel=1e-12)


@pytest.mark.parametrize(("weight", "other"), [(0.0, "fedavg"), (1.0, "fedvarp")])
def test_its_ends_are_fedavg_and_fedvarp(weight, other):
    found = run_scalar("fedavg", PATTERN, server="fedstale", stale_weight=weight, weights="uniform")
    assert found == pytest.approx(GOLDEN[other][2], abs=1e-5)
