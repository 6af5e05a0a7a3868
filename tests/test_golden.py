"""The golden scalar runs: f_k(w) = (w - a_k)^2 / 2, a = (0, 6, 3), W = 2, two exact steps of 0.1, five rounds."""

import pytest
from rig import run_scalar

FULL = [[0, 1, 2]] * 5
PATTERN = [[0, 1], [1], [0, 2], [], [1, 2]]
PLAIN = [2.190000, 2.343900, 2.468559, 2.569533, 2.651322]
PMFL = {"contrast_weight": 0.0}

GOLDEN = [
    ("fedavg", {"weights": "samples"}, PLAIN, [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]),
    ("fedavg", {"weights": "uniform"}, PLAIN, [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]),
    ("moon", {"contrast_weight": 0.0}, PLAIN, [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]),
    (
        "fedprox",
        {"proximal_weight": 0.5},
        [2.185000, 2.335775, 2.458657, 2.558805, 2.640426],
        [2.185000, 2.890775, 2.633482, 2.633482, 2.978788],
    ),
    ("fedau", {"cutoff": 50}, PLAIN, [2.126667, 2.371978, 2.261527, 2.261527, 2.638607]),
    ("fedau", {"cutoff": 2}, PLAIN, [2.126667, 2.371978, 2.301302, 2.301302, 2.680013]),
    ("pmfl", {**PMFL, "history_size": 0}, PLAIN, [2.126667, 2.371978, 2.265964, 2.265964, 2.776335]),
    (
        "pmfl",
        {**PMFL, "history_size": 3},
        [2.190000, 2.214938, 2.296825, 2.401933, 2.515566],
        [2.126667, 2.232486, 2.140504, 2.145388, 2.687577],
    ),
    ("pmfl", {**PMFL, "history_size": 0, "cutoff": 2}, PLAIN, [2.126667, 2.371978, 2.206302, 2.206302, 2.590416]),
]


@pytest.mark.parametrize(("name", "changes", "full", "pattern"), GOLDEN)
def test_golden_values(name, changes, full, pattern):
    assert run_scalar(name, FULL, **changes) == pytest.approx(full, abs=1e-5)
    assert run_scalar(name, PATTERN, **changes) == pytest.approx(pattern, abs=1e-5)


def test_pmfl_with_the_papers_sign_climbs():
    down = run_scalar("pmfl", FULL, **PMFL, history_size=0, start=10.0)
    up = run_scalar("pmfl", FULL, **PMFL, history_size=0, start=10.0, sign="paper")
    assert abs(down[-1] - 3) < 7 < abs(up[-1] - 3)


def test_one_client_is_centralised_sgd():
    w, expected = 2.0, []
    for _ in range(3):
        for _ in range(2):
            w -= 0.1 * (w - 6.0)
        expected.append(w)
    for name, changes in (("fedavg", {}), ("fedprox", {"proximal_weight": 0.0}), ("fedau", {}), ("moon", {})):
        values = run_scalar(name, [[0]] * 3, targets=(6,), **changes)
        assert values == pytest.approx(expected, rel=1e-14), name


def test_pmfl_step_is_divided_by_all_nodes():
    # METHODS P10: K = 4, Delta = 1 with x = 4 (first seen in round 4), Delta = -2 with x = 1 (seen every round).
    changes = {**PMFL, "history_size": 0}
    # Node 1 sits at its optimum at first (Delta 0), so that only round 4 moves; see the server rule's own test below.
    values = run_scalar("pmfl", [[], [], [], [0]], targets=(12, 2, 2, 2), **changes)
    # x = 4, Delta = 0.19 (12 - 2) = 1.9, K = 4: W = 2 + 4 * 1.9 / 4
    assert values == pytest.approx([2, 2, 2, 3.9], rel=1e-12)
