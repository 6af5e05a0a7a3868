"""FedAdam: by hand and the golden run."""

import pytest
from hand import path, rule_of


def test_by_hand():
    """For D = 1 the first step is 0.1 / (sqrt(0.99e-6 + 0.01) + 0.001) = 0.990050 eta. D = 0 stays, and -D mirrors."""
    up, _ = path(rule_of("fedadam", server_lr=1.0), [1, 1, None, 0.5])
    assert up[0] == pytest.approx(0.990050, abs=1e-6)
    assert up[2] == up[1]
    down, _ = path(rule_of("fedadam", server_lr=1.0), [-1, -1, None, -0.5])
    assert down == pytest.approx([-v for v in up], rel=1e-12)
    assert path(rule_of("fedadam"), [0, 0, 0], start=3.0)[0] == [3, 3, 3]
