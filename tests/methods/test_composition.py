"""Server rules beside node halves, METHODS section 40: any two that speak the same tensors go together."""

import pytest
from hand import FULL, GOLDEN, PATTERN
from rig import run_scalar

PLAIN_WORK = {"lr_decay": 1.0, "epoch_lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None, "augment": []}
NOTHING_OF_ITS_OWN = {
    "fedavg": {},
    "fedprox": {"proximal_weight": 0.0},
    "moon": {"contrast_weight": 0.0},
    "fedrcl": {"local": PLAIN_WORK},  # its contrast of one example is 0
    "pmfl": {"contrast_weight": 0.0},
    "fedlc": {"calibration": 0.0},
    "feddecorr": {"local": PLAIN_WORK},  # its penalty of one example is 0
}


@pytest.mark.parametrize("rule", GOLDEN)
@pytest.mark.parametrize("nodes", NOTHING_OF_ITS_OWN)
def test_server_rules_go_with_any_node_half(nodes, rule):
    """Nodes that send models and nodes that send changes, beside rules over either: always the rule's golden values."""
    changes, full, pattern = GOLDEN[rule]
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
