"""FedBABU: one common head that never trains, and a last tuning by hand that changes nothing afterwards."""

import pytest
import torch
from hand import heads, whole
from helpers import Scalar, build_received, config_of, same, scalar_workspace, strategy_settings, workspace_of


@pytest.mark.parametrize("head", ["classifier", "projector_classifier"])
def test_the_head_that_leaves_training_is_the_initial_one(head):
    initial = whole("fedbabu", [[]], head=head)[0]
    trained, memory, _ = whole("fedbabu", head=head)
    own = heads(memory)
    assert own
    assert all(value.equal(initial[name.split("personal/")[1]]) for name, value in own.items())
    still = {name.split("personal/")[1] for name in own}
    assert {name for name in initial if trained[name].equal(initial[name])} == still


def test_it_is_fedrep_without_its_head_phase():
    ours, fedrep = whole("fedbabu"), whole("fedrep", head_epochs=0)
    assert same(ours[0], fedrep[0])
    assert same(ours[1], fedrep[1])


LOCAL = ("lr", "lr_decay", "optimizer")


def scalar_client(**changes):
    """Return clients of the golden problem, whose single number is the head."""
    local = {"iterations": 2, "epochs": None, "batch_size": 1, "lr": 0.1, "momentum": 0.0}
    local |= {key: changes.pop(key) for key in LOCAL if key in changes}
    settings = config_of("num_clients=3") | {"strategy": strategy_settings("fedbabu", local=local, **changes)}
    model = Scalar(2.0)
    model.encoder = torch.nn.Flatten()
    workspace = scalar_workspace(settings, model)
    return workspace.client_class(workspace, [0, 1, 2])


@pytest.mark.parametrize("tune", ["head", "all"])
def test_tuning_by_hand(tune):
    """Two epochs of one step of 0.1 towards a = 0, 6, 3: w := a + (2 - a) 0.9^2."""
    found = scalar_client(tune=tune, tune_epochs=2, tune_lr=0.1, tune_momentum=0.0).evaluate_clients([{}] * 3, 5, final=True)
    assert [float(each.model["classifier.w"]) for each in found] == pytest.approx([1.62, 2.76, 2.19], rel=1e-12)
    for found in (
        scalar_client(tune_epochs=0).evaluate_clients([{}] * 3, 5, final=True),
        scalar_client().evaluate_clients([{}] * 3, 5),
    ):
        assert [float(each.model["classifier.w"]) for each in found] == [2.0] * 3


@pytest.mark.parametrize("local", [{}, {"lr": 0.5, "lr_decay": 0.5, "optimizer": "adam"}])
def test_tuning_has_its_own_rate_by_hand(local):
    """Two steps of 0.001 with momentum 0.9, whatever the training does: w := a + (2 - a) (0.999 - 0.001 (0.9 + 0.999))."""
    found = scalar_client(tune_epochs=2, **local).evaluate_clients([{}] * 3, 5, final=True)
    assert [float(each.model["classifier.w"]) for each in found] == pytest.approx([1.994202, 2.011596, 2.002899], rel=1e-12)


@pytest.mark.parametrize(("tune", "still"), [("all", set()), ("head", {"encoder", "projector"})])
def test_the_last_evaluation_tunes_what_is_asked_for_and_remembers_nothing(tune, still):
    network = ("model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config = config_of("strategy=fedbabu", f"strategy.tune={tune}", "num_clients=4", *network, "partition.test_fraction=0.3")
    workspace = workspace_of(config)
    client = workspace.client_class(workspace, [0])
    received = {n: v for n, v in build_received(workspace).items() if "classifier" not in n}
    (before,) = client.evaluate_clients([received], 3)
    assert same(before.model, workspace.initial)
    assert set(before.metrics) == {"accuracy", "loss"}
    (tuned,) = client.evaluate_clients([received], 3, final=True)
    assert {n.partition(".")[0] for n, v in tuned.model.items() if v.equal(workspace.initial[n])} == still
    assert client.client_states == [{}]
    assert tuned.metrics["untuned/loss"] == before.metrics["loss"] != tuned.metrics["loss"]
    config["strategy"]["local"]["proximal_weight"] = 9.0
    pulled = workspace_of(config)
    (free,) = pulled.client_class(pulled, [0]).evaluate_clients([received], 3, final=True)
    assert same(free.model, tuned.model)  # the pull of training holds no fine-tuning back
