"""FedAvg: its strategy by hand, the golden run, and equal methods."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hand import path, rule_of
from helpers import FULL_COHORTS, PATTERN, close, config_of, digits_run, run_scalar, same
from tiny import run_tiny

from contrafed.config.run_config import resolve
from contrafed.core.errors import UserError
from contrafed.server.replies import Replies, Reply


def test_weights_by_hand():
    """n = (1, 3), w = (0, 4): by samples 3, uniform 2."""
    replies = Replies([Reply(1, {"model/w": torch.tensor([4.0])}, 3, {}), Reply(0, {"model/w": torch.tensor([0.0])}, 1, {})])
    for weights, expected in (("samples", 3.0), ("uniform", 2.0)):
        rule = rule_of("fedavg", sizes=(1, 3), weights=weights)
        assert float(rule.aggregate({"w": torch.zeros(1)}, replies)["w"]) == expected


def test_weights_over_all_clients_by_hand():
    """K = 4 and p = (1/2, 1/4, 1, 1): Delta = (1, 3) of two clients gives 4 / 4, and (2 + 12) / 4."""
    # One of them alone gives half of FedAvg's step.
    known = SimpleNamespace(probability=lambda: np.array([0.5, 0.25, 1, 1]))
    for weights, moved in (("all_clients", [1.0, 1.5, 1.5]), ("known_probability", [3.5, 4.5, 4.5])):
        for rate in (1.0, 10.0):
            rule = rule_of("fedavg", sizes=(4, 4, 4, 4), weights=weights, server_lr=rate)
            rule.participation = known
            found = path(rule, [{0: 1.0, 1: 3.0}, {0: 2.0}, None])[0]
            assert found == pytest.approx([rate * value for value in moved], rel=1e-6)


def test_golden_values_over_all_clients():
    """The step is Delta_k / 3. Under full participation it is FedAvg's."""
    pattern = [2.126667, 2.371978, 2.261527, 2.261527, 2.545067]
    assert run_scalar("fedavg", PATTERN, weights="all_clients") == pytest.approx(pattern, abs=1e-5)
    sending_changes = run_scalar("pmfl", PATTERN, server="fedavg", weights="all_clients", contrast_weight=0.0)
    assert sending_changes == pytest.approx(pattern, abs=1e-5)
    everybody = [run_scalar("fedavg", FULL_COHORTS, weights=weights) for weights in ("all_clients", "uniform")]
    assert everybody[0] == pytest.approx(everybody[1], rel=1e-12)


def test_a_client_without_data_is_not_among_all_clients():
    assert path(rule_of("fedavg", sizes=(4, 0, 4), weights="all_clients"), [{0: 1.0}])[0] == [0.5]


def test_the_servers_rate_stretches_the_mean_step():
    """The steps are 0.5 of 2, then 0.5 of 4. A rate of 1 gives the mean itself, bit for bit."""
    assert path(rule_of("fedavg", server_lr=0.5), [2.0, 4.0])[0] == [1, 3]
    halves = digits_run("fedavg", 1, server_lr=0.5)[0]
    whole = digits_run("fedavg", 1)[0]
    close(halves[1], {name: (whole[0][name] + whole[1][name]) / 2 for name in whole[0]}, 1e-12)


def test_known_probabilities_in_a_run(tmp_path):
    """With p = 1/2 each participant has weight 1 / p."""
    run = run_tiny(tmp_path / "run", "strategy=fedavg", "strategy.weights=known_probability", "engine=local")
    weights = [float(row.split(",")[3]) for row in run[3].decode().splitlines() if ",weight," in row]
    assert weights
    assert weights == pytest.approx([2.0] * len(weights), rel=1e-12)


def test_unknown_probabilities_are_refused_in_one_line(tmp_path):
    (tmp_path / "there.csv").write_text("client,round,available\n0,1,1\n")
    trace = ("participation=trace", f"participation.path={tmp_path}/there.csv")
    line = "^strategy.weights=known_probability: participation=trace has no known probabilities$"
    for chosen in ("strategy=fedavg", "strategy=moon"):
        with pytest.raises(UserError, match=line):
            resolve(config_of(chosen, "strategy.weights=known_probability", *trace))
        resolve(config_of(chosen, "strategy.weights=all_clients", *trace))
        resolve(config_of(chosen, "strategy.weights=known_probability", "participation=uniform"))


def test_full_batch_single_step_equals_pooled_gradient_descent():
    """G2: one full-batch step weighted by samples is one step on the pooled mean loss."""
    whole = {"local": {"iterations": 1, "batch_size": 10_000}}
    many, _ = digits_run("fedavg", 1, **whole)
    pooled, _ = digits_run("fedavg", 1, clients=1, **whole)
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
    with pytest.raises(ValueError, match="3 factors for 2 models"):
        replies.weighted_sum("delta", np.ones(3))
    with pytest.raises(ValueError, match="no models"):
        Replies([]).weighted_sum("delta", np.ones(0))
