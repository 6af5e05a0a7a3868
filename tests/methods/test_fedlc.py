"""FedLC: calibrated logits by hand, equality to FedAvg with equal counts or no calibration, and plain logits in evaluation."""

import pytest
import torch
from hand import as_fedavg, class_losses
from helpers import close, config_of, strategy_settings, workspace_of

from contrafed.training.client_stack import ClientStack
from contrafed.training.prototypes import class_counts


def loss(logits, y, counts, **changes):
    losses, leaf = class_losses("fedlc", logits, y, changes, counts=counts)
    losses["loss"].backward()
    return losses["loss"].item(), leaf.grad


def test_by_hand():
    """Counts (16, 1), logits 0 and tau 1 give shifts 1/2 and 1. Label 0 costs log(1 + e^-0.5), and label 1 log(1 + e^0.5)."""
    assert loss([0.0, 0.0], 0, [16, 1])[0] == pytest.approx(0.474077, abs=1e-6)
    assert loss([0.0, 0.0], 1, [16, 1])[0] == pytest.approx(0.974077, abs=1e-6)
    assert loss([0.0, 0.0], 0, [16, 1], calibration=2.0)[0] == pytest.approx(0.313262, abs=1e-6)


def test_equal_counts_cancel_and_an_absent_class_is_out_of_the_sum():
    for counts in ([1, 1, 1], [50, 50, 50]):
        value, gradient = loss([1.0, 0.2, -0.4], 1, counts)
        softmax = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64).softmax(0)
        assert value == pytest.approx(-softmax[1].log().item(), rel=1e-12)
        torch.testing.assert_close(gradient, softmax - torch.tensor([0, 1, 0]), rtol=1e-12, atol=1e-15)
    value, gradient = loss([1.0, 0.2, 9.0], 1, [7, 7, 0])
    assert value == pytest.approx(loss([1.0, 0.2], 1, [7, 7])[0], rel=1e-12)
    assert gradient[2] == 0
    assert gradient.isfinite().all()


def test_without_calibration_nothing_is_masked():
    assert loss([0.0, 0.0], 0, [16, 0], calibration=0.0)[0] == pytest.approx(0.693147, abs=1e-6)


def test_equal_counts_of_all_classes_are_fedavg(monkeypatch):
    monkeypatch.setattr("contrafed.clients.fedlc.class_counts", lambda workspace, stack: torch.full((len(stack), 10), 12.0))
    fedlc, fedavg = as_fedavg("fedlc")
    for a, b in zip(fedlc, fedavg, strict=True):
        close(a, b)


def test_class_counts_are_those_of_the_stacks_training_parts():
    config = config_of("num_clients=6", "partition.min_client_size=5") | {"strategy": strategy_settings("fedlc")}
    workspace = workspace_of(config)
    partition, clients = workspace.federation.partition, [4, 0, 5]
    stack = ClientStack(clients, [partition.train(client) for client in clients], 1, {}, {}, {})
    assert class_counts(workspace, stack).tolist() == partition.class_counts()[clients].tolist()


def test_clients_and_the_global_model_are_evaluated_by_the_logits_as_they_are():
    from contrafed.clients.fedlc import FedLCClient
    from contrafed.training.base import Client

    assert FedLCClient.scores is Client.scores
    assert FedLCClient.eval_models is Client.eval_models
