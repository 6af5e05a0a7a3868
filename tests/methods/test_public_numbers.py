"""Numbers in the tests of other libraries: FL4Health's contrast of MOON, and SCAFFOLD in Apple's pfl-research."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hand import client_of, losses_of, rule_of
from helpers import Vector, config_of, strategy_settings, with_images, workspace_of
from torch import nn

from contrafed.core.split_model import Features
from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.server.base import Replies, Reply

# FL4Health: representations, those of the global model and of the previous local model, and the mean loss at T = 0.5.
CONTRASTS = [
    ([[1, 2, 2, 1], [2, 1, 1, -1]], [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 2, 1], [1, 1, 1, 1]], 0.837868),
    ([[1, 1, 1]], [[1, 1, 1]], [[0, 0, 0]], 0.126928),
    ([[0, 0, 0]], [[1, 1, 1]], [[0, 0, 0]], 0.693147),
]


@pytest.mark.parametrize(("local", "positive", "negative", "value"), CONTRASTS)
def test_moons_contrast_is_fl4healths(local, positive, negative, value):
    client, found = client_of("moon", contrast_weight=2.0), []
    for now, pull, push in zip(local, positive, negative, strict=True):
        losses, _ = losses_of(client, [float(number) for number in now], **{"global": [pull], "previous": [push]})
        found.append(losses["contrast"].item())
        assert losses["loss"].item() == pytest.approx(losses["task"].item() + 2 * found[-1], rel=1e-12)
    assert np.mean(found) == pytest.approx(value, abs=1e-6)


class Linear(Vector):
    """pfl's model: the products of an example's two numbers with a matrix."""

    def __init__(self):
        super().__init__([0.0, 0.0])
        self.classifier.w = nn.Parameter(torch.tensor([[2.0, 4.0], [3.0, 5.0]], dtype=torch.float64))

    def forward(self, x, dropout_mask=None, with_levels=False, encoded=False):
        out = x.flatten(1) @ self.classifier.w
        return Features(out, out, ())


def build_pfl_client():
    """Return a SCAFFOLD client with pfl's two examples, full batches and rate 0.1. Its loss is the mean L1 distance."""
    local = {"iterations": 1, "epochs": None, "batch_size": 2, "lr": 0.1}
    settings = config_of("num_clients=1") | {"strategy": strategy_settings("scaffold", local=local)}
    data = with_images(torch.tensor([[[[1, 0]]], [[[0, 2]]]], dtype=torch.uint8), [0, 1], num_classes=2)
    data = replace(data, mean=(0.0,), std=(1 / 255,))
    federation = Federation(data, Partition([np.arange(2)], [np.arange(0)], data.y.numpy(), 2))
    workspace = workspace_of(settings, dtype=torch.float64, federation=federation, model=Linear())
    targets = torch.tensor([[4.0, 6.0], [8.0, 12.0]], dtype=torch.float64)

    class OnTargets(workspace.client_class):
        def task_loss(self, features, batch):
            return (features.logits - targets[batch.y]).abs().sum(1).mean()

    return OnTargets(workspace, [0])


@pytest.mark.parametrize(("server_c", "change", "after"), [(0.0, [0.05, 0.1], 3.75), (0.1, [0.04, 0.09], 3.78)])
def test_scaffolds_client_makes_pfls_step(server_c, change, after):
    """Its c_k is the gradient (-0.5, -1). pfl stores W - w_end with the other sign, so it has 0.5 and 1, or 0.3 and 0.8."""
    client = build_pfl_client()
    model = client.workspace.initial["classifier.w"]
    received = {"model/classifier.w": model, "control/classifier.w": torch.full_like(model, server_c)}
    (first,) = client.update([received], 1)
    delta = first.tensors["delta/classifier.w"]
    assert delta.tolist() == [pytest.approx([value] * 2, rel=1e-9) for value in change]
    control = first.client_state["client_control/classifier.w"]
    assert control.tolist() == [pytest.approx([value] * 2, rel=1e-9) for value in (-0.5, -1.0)]
    assert first.metrics["task"] == pytest.approx(4)
    received["model/classifier.w"] = model + delta
    assert client.update([received], 2)[0].metrics["task"] == pytest.approx(after)


def test_scaffolds_server_makes_pfls_step():
    """Five of 100 clients, c = 2, each change of c_k 0.5 and of the model 1: c = 2.025 and W + 1."""
    rule = rule_of("scaffold", (1,) * 100, {"control/w": (1,)}, server_lr=1.0)
    rule.state["control"] = {"w": torch.tensor([2.0])}
    model = {"w": torch.tensor([3.0])}
    upload = {"delta/w": torch.ones(1), "control_delta/w": torch.full((1,), 0.5)}
    replies = Replies([Reply(client, upload, 1, {}, rule.broadcast(model)) for client in range(5)])
    assert float(rule.next_model(model, replies)["w"]) == pytest.approx(4)
    assert float(rule.state["control"]["w"]) == pytest.approx(2.025)
