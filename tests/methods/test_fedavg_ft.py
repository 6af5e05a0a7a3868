"""FedAvg+FT: tuning by hand and in the golden problem, without a change of FedAvg's W."""

import pytest
import torch
from helpers import FULL_COHORTS, config_of, same, strategy_settings, workspace_of
from left import scalar_left

STEPS = {"tune_epochs": 2, "tune_lr": 0.1, "tune_momentum": 0.0, "tune_batch_size": 1}


@pytest.mark.parametrize("tune", ["head", "all"])
def test_golden_values(tune):
    """Two steps start from W^5. The problem's single number is its classifier."""
    run = scalar_left("fedavg_ft", FULL_COHORTS, tune=tune, **STEPS)
    assert [run.evaluate_client(client) for client in range(3)] == pytest.approx([2.147571, 3.287571, 2.717571], abs=1e-5)
    assert [run.evaluate_client(client, final=False) for client in range(3)] == [run.w[-1]] * 3


def test_tuning_by_hand_with_momentum():
    """f = (w - 6)^2 / 2 from W = 2: two steps of 0.1 with momentum 0.5."""
    run = scalar_left("fedavg_ft", [[]], targets=(6,), **STEPS | {"tune_momentum": 0.5})
    w, speed = 2.0, 0.0
    for _ in range(2):
        speed = 0.5 * speed + (w - 6)
        w -= 0.1 * speed
    assert run.evaluate_client(0) == pytest.approx(w, abs=1e-12)


def client_of(**changes):
    config = config_of("strategy=fedavg_ft", "num_clients=8", "model=mlp", "model.projection=[12]", "dataset.merge_splits=true")
    config["strategy"] = strategy_settings("fedavg_ft", **changes)
    workspace = workspace_of(config, dtype=torch.float64)
    return workspace.client_class(workspace, [0]), {f"model/{n}": v for n, v in workspace.initial.items()}


def test_what_is_tuned_moves_and_nothing_else():
    whole = {"encoder", "projector", "classifier"}
    for tune, head, moved in (
        ("head", "classifier", {"classifier"}),
        ("head", "projector_classifier", {"projector", "classifier"}),
        ("all", "classifier", whole),
    ):
        client, received = client_of(tune=tune, head=head)
        (evaluated,) = client.evaluate_clients([received], 3, final=True)
        changed = {n.split(".")[0] for n, v in evaluated.model.items() if not torch.equal(v, received[f"model/{n}"])}
        assert changed == moved
    client, received = client_of(tune_epochs=0)
    (evaluated,) = client.evaluate_clients([received], 3, final=True)
    assert all(torch.equal(value, received[f"model/{name}"]) for name, value in evaluated.model.items())


def test_tuning_draws_the_same_whatever_ran_before_and_changes_no_later_round():
    client, received = client_of()
    (first,) = client.evaluate_clients([received], 3, final=True)
    (before,) = client_of()[0].update([received], 3)
    (after,) = client.update([received], 3)
    (again,) = client.evaluate_clients([received], 3, final=True)
    assert same(first.model, again.model)
    assert same(before.tensors, after.tensors)
    assert (client.client_states, after.client_state) == ([{}], {})


def test_w_is_evaluated_beside_what_became_of_it():
    client, received = client_of()
    (last,), (earlier,) = client.evaluate_clients([received], 3, final=True), client.evaluate_clients([received], 3)
    assert set(earlier.metrics) == {"loss", "accuracy"}
    assert {name: last.metrics[f"untuned/{name}"] for name in earlier.metrics} == earlier.metrics
    assert last.metrics["loss"] < earlier.metrics["loss"]
