"""FedAvgM: by hand, the golden run, and FedAvg without momentum."""

import pytest
from hand import FULL_COHORTS, GOLDEN, PATTERN, path, rule_of
from helpers import run_scalar


def test_by_hand():
    """D = 1 each round and rho = 0.5 give 1, 2.5, 4.25. A round without replies changes nothing."""
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, 1, 1])[0] == [1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, None, 1, 1])[0] == [1, 1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.0, server_lr=0.5), [1, 1])[0] == [0.5, 1]


def test_golden_values():
    changes, full, pattern = GOLDEN["fedavgm"]
    assert run_scalar("fedavgm", FULL_COHORTS, **changes) == pytest.approx(full, abs=1e-5)
    assert run_scalar("fedavgm", PATTERN, **changes) == pytest.approx(pattern, abs=1e-5)


def test_without_momentum_it_is_fedavg():
    for rounds in (FULL_COHORTS, PATTERN):
        assert run_scalar("fedavgm", rounds, server_momentum=0.0) == pytest.approx(run_scalar("fedavg", rounds), rel=1e-12)
