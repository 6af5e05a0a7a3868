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
    (
        "fedavgm",
        {},
        [2.190000, 2.419900, 2.622079, 2.774756, 2.878623],
        [2.190000, 2.989900, 3.026779, 3.026779, 3.321443],
    ),
    (
        "fedadam",
        {"server_lr": 0.1},
        [2.094876, 2.223932, 2.373920, 2.536390, 2.704222],
        [2.094876, 2.212567, 2.300121, 2.300121, 2.416998],
    ),
    (
        "fedagm",
        {},
        [2.189980, 2.474672, 2.770489, 3.017767, 3.184646],
        [2.189980, 3.044612, 3.339595, 3.339595, 3.763150],
    ),
    ("pmfl", {**PMFL, "history_size": 0, "cutoff": 2}, PLAIN, [2.126667, 2.371978, 2.206302, 2.206302, 2.590416]),
]


@pytest.mark.parametrize(("name", "changes", "full", "pattern"), GOLDEN)
def test_golden_values(name, changes, full, pattern):
    assert run_scalar(name, FULL, **changes) == pytest.approx(full, abs=1e-5)
    assert run_scalar(name, PATTERN, **changes) == pytest.approx(pattern, abs=1e-5)


# By rule: changes, and the golden values that any node half with nothing of its own gives beside it.
RULES = {
    "fedavg": ({}, GOLDEN[1]),
    "fedau": ({"cutoff": 2}, GOLDEN[5]),
    "pmfl": ({}, GOLDEN[7]),
    "fedavgm": ({}, GOLDEN[8]),
    "fedadam": ({"server_lr": 0.1}, GOLDEN[9]),
    "fedagm": ({}, GOLDEN[10]),
}
PLAIN_WORK = {"lr_decay": 1.0, "epoch_lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None, "augment": []}
NOTHING_OF_ITS_OWN = {
    "fedavg": {},
    "fedprox": {"proximal_weight": 0.0},
    "moon": {"contrast_weight": 0.0},
    "fedrcl": {"local": PLAIN_WORK},  # its contrast of one example is 0
    "pmfl": {"contrast_weight": 0.0},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("nodes", NOTHING_OF_ITS_OWN)
def test_server_rules_go_with_any_node_half(nodes, rule):
    """Nodes that send models and nodes that send changes, beside rules over either: always the rule's golden values."""
    changes, (_, _, full, pattern) = RULES[rule]
    for schedule, values in ((FULL, full), (PATTERN, pattern)):
        found = run_scalar(nodes, schedule, server=rule, **changes, **NOTHING_OF_ITS_OWN[nodes])
        assert found == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(("rule", "neutral"), [("fedavgm", {"server_momentum": 0.0}), ("fedagm", {"server_momentum": 0.0})])
def test_neutral_server_rules_are_fedavg_beside_any_node_half(rule, neutral):
    plain = {"proximal_weight": 0.0} if rule == "fedagm" else {}
    for nodes in ("fedrcl", "pmfl"):
        own = NOTHING_OF_ITS_OWN[nodes] | {"local": PLAIN_WORK | plain}
        values = run_scalar(nodes, PATTERN, server=rule, **neutral, **own)
        assert values == pytest.approx(run_scalar("fedavg", PATTERN), rel=1e-12)


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
