"""FedAMP: mixtures and a step by hand, and Local without the pull. test_by_hand.py has the golden values."""

import math

import numpy as np
import pytest
import torch
from helpers import close, same
from left import build_broadcast, digits_left, scalar_client

from contrafed.server.base import Replies, Reply, Round
from contrafed.strategies.fedamp import Config, FedAMP, mean_squared_distance

INITIAL_MODEL = {"w": torch.tensor([0.5], dtype=torch.float64)}


def server(models, **changes):
    """Return the strategy after these uploads, a list of numbers by client, from ``changes["clients"]`` if given."""
    clients = changes.pop("clients", range(len(models)))
    rule = FedAMP.__new__(FedAMP)
    rule.config = Config(**{"cloud_lr": 1.0, "sigma": 1.0, "relative": False, "cap": True} | changes)
    rule.state, rule.after_training, rule.round = {}, False, Round(1, np.zeros(0, dtype=np.int64))
    rule.setup()
    rule.own_weights = dict.fromkeys(range(9), 1.0)
    parts = [Reply(k, {"model/w": torch.tensor(m, dtype=torch.float64)}, 1, {}) for k, m in zip(clients, models, strict=True)]
    rule.aggregate(INITIAL_MODEL, Replies(parts))
    return rule


def cloud(rule, client):
    return rule.per_client_broadcast(INITIAL_MODEL, client, evaluating=False)["model/w"].tolist()


def test_a_mixture_by_hand():
    """w = (0, 1), alpha = sigma = 1: xi = e^-1, u = (e^-1, 1 - e^-1)."""
    rule = server([[0.0], [1.0]])
    assert (cloud(rule, 0), cloud(rule, 1)) == ([pytest.approx(0.367879, abs=1e-6)], [pytest.approx(0.632121, abs=1e-6)])
    assert rule.own_weights[0] == pytest.approx(1 - math.exp(-1))
    assert rule.per_client_broadcast(INITIAL_MODEL, 0, evaluating=True) is None
    rule.after_training = True  # an evaluated client trains first
    assert rule.per_client_broadcast(INITIAL_MODEL, 0, evaluating=True)["model/w"].tolist() == cloud(rule, 0)


def test_a_client_never_heard_of_holds_the_initial_model_and_is_in_nobodys_mixture():
    rule = server([[0.0], [1.0]], clients=[1, 4])
    near = math.exp(-0.25)  # weight of both, at most two thirds
    assert 2 * near > 2 / 3
    assert cloud(rule, 0) == [pytest.approx(0.5 / 3 + 1 / 3)]
    assert cloud(rule, 1) == [pytest.approx(0.367879, abs=1e-6)]
    assert cloud(server([], clients=[]), 3) == [0.5]


def test_the_cap():
    near = [[0.0], [0.001], [-0.001]]
    assert cloud(server(near), 1) == [pytest.approx(0.0, abs=1e-9)]  # the plain mean
    assert server(near, cap=False).weights({"w": torch.zeros(1)}, [{"w": torch.zeros(1)}] * 2) == [1.0, 1.0]
    assert cloud(server(near, cap=False), 1) == [pytest.approx(-0.002, abs=1e-6)]  # its own counts -1


def test_far_and_equal_models_leave_each_its_own():
    assert cloud(server([[0.0], [100.0]]), 1) == [100.0]
    for relative in (False, True):
        assert cloud(server([[0.3, 0.2]] * 3, relative=relative), 1) == pytest.approx([0.3, 0.2], abs=1e-15)


def test_relative_sigma_and_the_order_of_replies():
    models = [{"w": torch.tensor(m)} for m in ([0.0, 0.0], [2.0, 0.0], [0.0, 4.0])]
    assert mean_squared_distance(models) == pytest.approx((4 + 16 + 20) / 3)
    values, rate = [[0.0], [1.0], [3.0]], {"cloud_lr": 0.1, "relative": True}
    rule = server(values, **rate)
    assert rule.state["spread"] == pytest.approx(14 / 3)
    xi = [0.1 * math.exp(-d / (14 / 3)) for d in (1, 9)]
    for scale in (10.0, 0.1):
        scaled = server([[scale * value for value in row] for row in values], **rate)
        assert cloud(scaled, 0)[0] == pytest.approx(scale * cloud(rule, 0)[0])
    assert cloud(rule, 0) == [pytest.approx(xi[0] * 1 + xi[1] * 3)]
    assert cloud(server(values[::-1], clients=[2, 1, 0], **rate), 0) == cloud(rule, 0)


def test_a_step_by_hand():
    """f = (w - 3)^2 / 2, w = 2, u = 0, lambda / alpha = 2: 2 - 0.1 (-1 + 4)."""
    client = scalar_client("fedamp", 3, start=2.0, pull_weight=1.0, cloud_lr=0.5)
    (update,) = client.update([build_broadcast(model=0.0)], 1)
    assert float(update.client_state["own/classifier.w"]) == pytest.approx(1.7, abs=1e-12)
    assert torch.equal(update.tensors["model/classifier.w"], update.client_state["own/classifier.w"])
    (first,) = client.update([build_broadcast(model=2.0)], 1)  # what a first round receives: no pull
    assert float(first.client_state["own/classifier.w"]) == pytest.approx(2.1, abs=1e-12)


def test_without_the_pull_clients_train_alone():
    run, alone = digits_left("fedamp", pull_weight=0.0), digits_left("local")
    for client in alone.client_state:
        assert same(run.own(client), alone.own(client, "personal"))
        close(run.strategy.state["known"][client], run.own(client))
    pulled = digits_left("fedamp")
    assert any(not same(pulled.own(client), run.own(client)) for client in run.client_state)
