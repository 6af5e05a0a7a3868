"""Common properties of methods that average whole models: a zero rate changes nothing, the messages, and the client state."""

import pytest
import torch
from hand import EPOCH, WORK, as_fedavg
from helpers import METHODS, close, config_of, digits_run, run_scalar, same, slow, workspace_of
from left import stacked_equals_alone

from contrafed.clients.fedavg import FedAvgClient
from contrafed.training.base import LocalError
from contrafed.training.batches import Batches


@pytest.mark.parametrize(
    ("state", "sent", "said"),
    [
        ({"last": torch.zeros(1, 1)}, {}, "init_client_state must return a value for last, which local_update keeps"),
        ({}, {"extra": torch.ones(1)}, "local_update must return .*what message_spec declares, which extra is not"),
        (
            {},
            {"model/classifier.bias": torch.ones(1, 3)},
            r"must return .*classifier.bias of shape \(1, 10\), as message_spec declares it, not \(1, 3\)",
        ),
        ({}, {"model/classifier.bias": torch.ones(1, 10).int()}, "must return .*bias in float32 or float64, not torch.int32"),
    ],
)
def test_what_is_remembered_and_sent_must_be_declared(state, sent, said):
    """Otherwise one engine would keep it and another not, and every reply would be rejected."""

    class Undeclared(FedAvgClient):
        def local_update(self, stack):
            stack.state |= state
            return super().local_update(stack) | sent

    workspace = workspace_of(config_of("strategy=fedavg", "num_clients=4", "model=mlp"))
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    with pytest.raises(LocalError, match=said):
        Undeclared(workspace, [0]).update([received], 1)


def test_one_client_is_centralised_sgd():
    w, expected = 2.0, []
    for _ in range(3):
        for _ in range(2):
            w -= 0.1 * (w - 6.0)
        expected.append(w)
    plain = {"local": {"momentum": 0.0, "weight_decay": 0.0}}  # MOON's training settings have both
    for name, changes in (("fedavg", {}), ("fedprox", {"proximal_weight": 0.0}), ("fedau", {}), ("moon", plain)):
        values = run_scalar(name, [[0]] * 3, targets=(6,), **changes)
        assert values == pytest.approx(expected, rel=1e-14), name


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("fedntd", {"distil_weight": 0.0}),
        ("fedlc", {"calibration": 0.0}),
        ("feddecorr", {"decorrelation_weight": 0.0}),
        ("fedmlb", {"hybrid_weight": 0.0, "distil_weight": 0.0}),
        ("fedavg_fitnet", {"hint_weight": 0.0}),
    ],
)
def test_without_its_own_terms_a_loss_is_fedavgs_bit_for_bit(name, neutral):
    assert all(map(same, *as_fedavg(name, **neutral)))
    ours, fedavg = as_fedavg(name)
    assert not same(ours[-1], fedavg[-1])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        slow("apfl", {"local": {"momentum": 0.5, "weight_decay": 0.01}}),
        slow("ditto", {"local": {"momentum": 0.5, "clip_norm": 1.0}}),
        slow("fedawe", {"local": WORK}),
        slow("fedbabu", {"local": EPOCH | {"momentum": 0.9}}),
        slow("feddyn", {"local": EPOCH | {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None}}),
        slow("fedexp", {"local": WORK}),
        ("fednova", {"local": WORK | {"batch_size": 9, "momentum": 0.5}}),
        slow("fedproc", {"local": {"epochs": 1}}),
        *(
            slow("perfedavg", {"gradient": gradient, "inner_lr": 0.1, "local": {"batch_size": 3}})
            for gradient in ("first_order", "hessian_free", "exact")
        ),
        slow("pfedme", {"outer_lr": 0.05, "local": {"clip_norm": 1.0, "lr": 0.02}}),
        slow("scaffold", {"local": {"lr": 0.02, "epoch_lr_decay": 0.5, "epochs": 2}}),
    ],
)
def test_a_stack_equals_its_clients_alone_with_other_training_settings(name, changes):
    stacked_equals_alone(name, **changes)


@pytest.mark.parametrize(
    ("name", "uploads", "remembers"),
    [
        ("fedavg", "model", False),
        ("fedprox", "model", False),
        ("fedau", "model", False),
        ("fedrcl", "model", False),
        ("moon", "model", True),
        ("pmfl", "delta", True),
    ],
)
def test_a_method_of_whole_models_declares_them_and_whether_it_remembers(name, uploads, remembers):
    """test_every.py compares messages and client states with what is declared."""
    workspace = workspace_of(config_of(f"strategy={name}", "num_clients=40", "model=mlp"))
    shapes = {n: tuple(p.shape) for n, p in workspace.initial.items()}
    declared = [{f"{group}/{n}": shape for n, shape in shapes.items()} for group in ("model", uploads)]
    assert list(workspace.client_class.message_spec(workspace.model, workspace.config)) == declared
    assert workspace.client_class.has_client_state(workspace.model, workspace.config) == remembers


@pytest.mark.parametrize("name", METHODS)
def test_no_learning_leaves_the_model(name):
    """G3, with histories and buffers of constants."""
    models, _ = digits_run(name, 3, clients=40, schedule=[range(5)] * 3, local={"lr": 1e-300, "iterations": 5, "epochs": None})
    close(models[0], models[-1], 1e-12)


def test_methods_share_their_batches(monkeypatch):
    """Return the examples of every step of two rounds, for methods with equal training settings."""
    drawn, seen = Batches.draw, {}

    def record_batches(workspace, local_training, stack, purpose, *limits):
        found = drawn(workspace, local_training, stack, purpose, *limits)
        if purpose == "batches":
            rows = zip(stack.clients, found.index, found.real, strict=True)
            seen[name] |= {
                (stack.server_round, client): (index[real].tolist(), real.sum(1).tolist()) for client, index, real in rows
            }
        return found

    monkeypatch.setattr(Batches, "draw", record_batches)
    training = EPOCH | {"lr_decay": 1.0, "epoch_lr_decay": 1.0, "augment": []}
    names = ("fedavg", "moon", "pmfl", "fedrcl", "fedntd")
    for name in names:
        seen[name] = {}
        digits_run(name, 2, clients=40, schedule=[[0, 2], [0, 3]], stack_size=2, local=training)
    assert seen["fedavg"].keys() == {(1, 0), (1, 2), (2, 0), (2, 3)}
    assert seen["fedavg"][1, 0] != seen["fedavg"][2, 0]
    assert all(seen[name] == seen["fedavg"] for name in names)
