"""FedAvg, METHODS section 6: its rule by hand, the golden run, and what it equals."""

import numpy as np
import pytest
import torch
from hand import FULL, PATTERN, rule_of
from rig import close, digits_run, run_scalar, same

from strategies.replies import Replies, Reply


def test_weights_by_hand():
    """n = (1, 3), w = (0, 4): by samples 3, uniform 2."""
    replies = Replies([Reply(1, {"model/w": torch.tensor([4.0])}, 3, {}), Reply(0, {"model/w": torch.tensor([0.0])}, 1, {})])
    for weights, expected in (("samples", 3.0), ("uniform", 2.0)):
        rule = rule_of("fedavg", sizes=(1, 3), weights=weights)
        assert float(rule.aggregate({"w": torch.zeros(1)}, replies)["w"]) == expected


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_golden_values(weights):
    full = [2.190000, 2.343900, 2.468559, 2.569533, 2.651322]
    pattern = [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]
    assert run_scalar("fedavg", FULL, weights=weights) == pytest.approx(full, abs=1e-5)
    assert run_scalar("fedavg", PATTERN, weights=weights) == pytest.approx(pattern, abs=1e-5)


def test_full_batch_single_step_equals_pooled_gradient_descent():
    """G2: one full-batch step weighted by samples is one step on the pooled mean loss."""
    whole = {"local": {"iterations": 1, "batch_size": 10_000}}
    many, _ = digits_run("fedavg", 1, **whole)
    pooled, _ = digits_run("fedavg", 1, nodes=1, **whole)
    close(many[-1], pooled[-1])


def test_mean_of_equal_models_is_that_model():
    """G5, and G4: the order of replies does not change a bit."""
    rng = np.random.default_rng(1)
    rows = [Reply(k, {"model/w": torch.from_numpy(rng.normal(size=50)).float()}, k + 1, {}) for k in range(7)]
    weights = rng.random(7)
    forward, backward = Replies(rows), Replies(reversed(rows))
    assert torch.equal(forward.mean("model", weights)["w"], backward.mean("model", weights)["w"])
    equal = Replies(Reply(k, {"model/w": torch.full((5,), 0.1)}, 1, {}) for k in range(7))
    torch.testing.assert_close(equal.mean("model", weights)["w"].float(), torch.full((5,), 0.1), rtol=1e-7, atol=0)


def test_a_weighted_sum_takes_one_group_of_tensors_and_a_weight_for_each_reply():
    x = torch.tensor([1.0, 2.0])
    replies = Replies(Reply(k, {"delta/w": (k + 1) * x, "other/w": x}, 1, {}) for k in (2, 0))
    assert same(replies.weighted_sum("delta", np.array([8.0, 0.25])), {"w": 8.75 * x.double()})
    with pytest.raises(ValueError, match="3 weights for 2 replies"):
        replies.weighted_sum("delta", np.ones(3))
    with pytest.raises(ValueError, match="no replies"):
        Replies([]).weighted_sum("delta", np.ones(0))
