"""FedProc: its contrast and its mix by hand, and FedAvg where cross-entropy is alone."""

import math

import pytest
import torch
from helpers import digits_run, same

from contrafed.training.base import Batch, Client
from contrafed.training.losses import prototype_contrast

ROUNDS = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5]]
TWO_CLASSES = torch.eye(2, dtype=torch.float64)


def contrast(z, y=0, means=TWO_CLASSES, valid=(1, 1)):
    z = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    value = prototype_contrast(z, torch.tensor([y]), means, torch.tensor(valid, dtype=torch.float64))[0]
    return value, torch.autograd.grad(value, z)[0]


def test_contrast_by_hand():
    assert contrast([1.0, 0.0])[0].item() == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-12)  # 0.313262
    assert contrast([7.0, 0.0], means=TWO_CLASSES * 3)[0].item() == pytest.approx(0.313262, abs=1e-6)  # lengths say nothing
    equal, gradient = contrast([0.3, 0.4], means=torch.ones(2, 2, dtype=torch.float64))
    assert equal.item() == pytest.approx(math.log(2), rel=1e-12)
    assert gradient.abs().max() < 1e-15


def test_classes_without_a_prototype_are_masked():
    assert contrast([1.0, 0.0], y=1, valid=(1, 0))[0].item() == 0
    assert contrast([1.0, 0.0], y=0, valid=(1, 0))[0].item() == pytest.approx(0, abs=1e-15)


def test_the_mix_by_hand(monkeypatch):
    """a = 0.25, CE = 1, L_p = 0.313262: 0.484946."""
    from contrafed.clients.fedproc import FedProcClient

    class Fixed(FedProcClient):
        def __init__(self):
            pass

        def forward(self, params, batch):
            return type("F", (), {"z": torch.tensor([[1.0, 0.0]], dtype=torch.float64)})

        def task_loss(self, features, batch):
            return torch.tensor(1.0, dtype=torch.float64)

    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(torch.zeros(1, 1), torch.tensor([0]), one, one)
    given = {"means": TWO_CLASSES, "valid": torch.ones(2), "mix": torch.tensor(0.25, dtype=torch.float64)}
    losses = Fixed().loss({}, batch, given)
    assert losses["loss"].item() == pytest.approx(0.484946, abs=1e-6)
    assert losses["contrast"].item() == pytest.approx(0.313262, abs=1e-6)
    nobody = given | {"valid": torch.zeros(2), "mix": torch.tensor(1.0, dtype=torch.float64)}
    assert Fixed().loss({}, batch, nobody)["loss"].item() == 1


def test_the_first_round_is_fedavgs_and_the_second_is_not():
    fedproc, rule = digits_run("fedproc", 2, local={"epochs": 1})
    local = {"epochs": 1, "iterations": None, "batch_size": 64, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-5}
    fedavg, _ = digits_run("fedavg", 2, local=local)
    assert same(fedproc[1], fedavg[1])
    assert not same(fedproc[2], fedavg[2])
    assert rule.state["valid"].all()


def test_cross_entropy_alone_throughout_is_fedavg():
    class Never(_rule("fedproc")):
        def broadcast(self, model):
            return super().broadcast(model) | {"mix/weight": torch.tensor(1.0)}

    local = {"epochs": 1, "iterations": None, "batch_size": 64, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-5}
    fedproc, _ = digits_run("fedproc", schedule=ROUNDS, num_rounds=4, local={"epochs": 1}, rule=Never)
    fedavg, _ = digits_run("fedavg", schedule=ROUNDS, num_rounds=4, local=local)
    assert same(fedproc[-1], fedavg[-1])


def test_the_share_of_cross_entropy_grows_over_the_planned_rounds():
    shares = []

    class Seen(_rule("fedproc")):
        def broadcast(self, model):
            sent = super().broadcast(model)
            shares.append(float(sent["mix/weight"]))
            return sent

    digits_run("fedproc", schedule=[[0, 1], [], [1], [0]], num_rounds=4, local={"epochs": 1}, rule=Seen)
    assert shares == [1.0, 0.25, 0.5, 0.75]


def test_it_remembers_nothing():
    from contrafed.clients.fedproc import FedProcClient

    assert FedProcClient.init_client_state is Client.init_client_state


def _rule(name):
    from importlib import import_module

    return import_module(f"contrafed.strategies.{name}").FedProc
