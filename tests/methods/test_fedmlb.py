"""FedMLB: its loss against an explicit network, its gradients, and equality to FedAvg without its terms."""

import pytest
import torch
import torch.nn.functional as F
from helpers import close, config_of, digits_run, same, strategy_settings, workspace_of

from contrafed.training.base import Batch


def network(seed=0, **changes):
    """Return a client of two hidden layers, each with a ReLU, and a batch of eight."""
    config = config_of("num_clients=2", "model=mlp", "model.hidden=[8,6]") | {"seed": seed}
    config["strategy"] = strategy_settings("fedmlb", **changes)
    workspace = workspace_of(config, dtype=torch.float64)
    index = torch.arange(8)
    batch = Batch(workspace.images(index), workspace.labels(index), torch.ones(8, dtype=torch.float64), {})
    return workspace.client_class(workspace, [0]), batch, {n: v.clone().requires_grad_() for n, v in workspace.initial.items()}


def test_against_a_network_written_out():
    client, batch, own = network(temperature=2.0)
    _, _, received = network(seed=1)
    layers = ("encoder.stages.0.1", "encoder.stages.1", "classifier")
    (w, b), (u, c) = ([[p[f"{at}.{kind}"] for at in layers] for kind in ("weight", "bias")] for p in (own, received))
    x = batch.x.flatten(1)
    first = F.relu(F.linear(x, w[0], b[0]))
    second = F.relu(F.linear(first, w[1], b[1]))
    main = F.linear(second, w[2], b[2])
    hybrids = [F.linear(F.relu(F.linear(first, u[1], c[1])), u[2], c[2]), F.linear(second, u[2], c[2])]
    p, q = [(h / 2).softmax(1) for h in hybrids], (main / 2).softmax(1)
    hybrid = sum(F.cross_entropy(h, batch.y) for h in hybrids) / 2
    distil = sum((each * (each / q).log()).sum(1).mean() for each in p) / 2
    losses = client.loss(own, batch, received)
    assert losses["hybrid"].item() == pytest.approx(hybrid.item(), rel=1e-12)
    assert losses["distil"].item() == pytest.approx(distil.item(), rel=1e-10)
    assert losses["loss"].item() == pytest.approx((F.cross_entropy(main, batch.y) + hybrid + distil).item(), rel=1e-12)


def test_at_the_first_step_the_loss_is_twice_cross_entropy():
    client, batch, own = network()
    losses = client.loss(own, batch, {n: v.detach() for n, v in own.items()})
    assert losses["distil"].item() == 0
    assert losses["loss"].item() == pytest.approx(2 * losses["task"].item(), rel=1e-12)


def test_gradients_pass_the_received_blocks_but_do_not_stay_there():
    client, batch, own = network()
    _, _, other = network(seed=1)
    received = {n: v.detach() for n, v in other.items()}
    client.loss(own, batch, received)["hybrid"].backward()
    assert own["encoder.stages.0.1.weight"].grad.abs().max() > 0
    assert own["encoder.stages.1.weight"].grad.abs().max() > 0  # by the hybrid of the last level
    assert own["classifier.weight"].grad is None  # which has the received classifier
    assert all(v.grad is None for v in received.values())


def test_the_received_model_stays_as_it_was_sent():
    sent, kept = [], []

    class Watched(network()[0].workspace.client_class):
        def local_update(self, stack):
            sent.append({n: v.clone() for n, v in stack.global_model.items()})
            found = super().local_update(stack)
            kept.append(stack.global_model)
            return found

    digits_run("fedmlb", 1, clients=3, stack_size=3, client_class=Watched, local={"epochs": 1})
    assert sent
    assert all(map(same, sent, kept))


@pytest.mark.slow
def test_with_convolutions_a_stack_equals_its_clients_alone():
    local = {"epochs": 1, "batch_size": 20}
    alone, stacked = (digits_run("fedmlb", 2, clients=4, model="cnn_pmfl", stack_size=size, local=local)[0] for size in (1, 4))
    close(alone[-1], stacked[-1])
