"""FedAS: alignment, Fisher information and the weighted mean by hand, and stacked equals alone."""

import pytest
import torch
from hand import client_of
from helpers import config_of, workspace_of

from contrafed.server.base import Replies, Reply
from contrafed.strategies.fedas import FedAS
from contrafed.training.base import Batch

ROUNDS = [[0, 1, 2, 3], [1, 3, 4, 5], [0, 1]]


def test_the_alignment_by_hand():
    """z = (1, 3) and m = (0, 1): (1 + 4) / 2 for a class with any number of examples, and none from padding."""
    client = client_of("fedas")
    ones = torch.ones(3, 1, 1, 1, dtype=torch.float64)
    batch = Batch(ones, torch.zeros(3, dtype=torch.long), torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), {})
    params = {"classifier.w": torch.tensor([1.0, 3.0], dtype=torch.float64)}
    losses = client.alignment(params, batch, {"means": torch.tensor([[0.0, 1.0]], dtype=torch.float64)})
    assert float(losses["loss"]) == pytest.approx(2.5)


def test_the_mean_is_weighted_by_the_fisher_information():
    rule = FedAS.__new__(FedAS)
    rule.round = type("Round", (), {"client_metrics": {}})()
    for traces, mean in (((3.0, 1.0), 1.5), ((0.0, 0.0), 2.0)):
        replies = Replies(
            Reply(k, {"model/w": torch.tensor([w]), "report/fisher": torch.tensor(trace)}, 1, {})
            for k, (w, trace) in enumerate(zip((1.0, 3.0), traces, strict=True))
        )
        assert float(rule.aggregate({"w": torch.tensor([0.0])}, replies)["w"]) == pytest.approx(mean)
        assert rule.round.client_metrics["weight"][1].tolist() == pytest.approx([1.5, 0.5] if any(traces) else [1.0, 1.0])


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
def test_it_declares_the_steps_that_it_takes(last_batch):
    asked = ("strategy=fedas", "num_clients=4", "model=mlp", "model.hidden=[6]", f"strategy.local.last_batch={last_batch}")
    workspace = workspace_of(config_of(*asked))
    client = workspace.client_class(workspace, [1])
    client.update([{f"model/{n}": v for n, v in workspace.initial.items() if client.is_shared(n)}], 1)
    taken = sum(losses.steps[0] for losses in client.losses)
    assert client.num_local_steps(int(workspace.federation.partition.sizes[1])) == taken
    assert {"task", "alignment", "loss"} == set().union(*(losses.sums() for losses in client.losses))


def test_the_fisher_information_is_the_sum_over_batches_of_squared_gradients():
    workspace = workspace_of(config_of("strategy=fedas", "num_clients=4", "model=mlp", "model.hidden=[6]"), dtype=torch.float64)
    client, seen = workspace.client_class(workspace, [1]), []
    client.fisher = lambda stack: seen.append((type(client).fisher(client, stack), stack)) or seen[0][0]
    client.update([{f"model/{n}": v for n, v in workspace.initial.items() if client.is_shared(n)}], 1)
    ((found, stack),) = seen
    expected = 0.0
    for rows in map(torch.from_numpy, client.fisher_batches(stack).rows[0]):
        leaves = {name: value[0].detach().requires_grad_() for name, value in stack.params.items()}
        logits = client.features(leaves, workspace.images(rows)).logits
        loss = torch.nn.functional.cross_entropy(logits, workspace.labels(rows))
        expected += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, list(leaves.values())))
    assert float(found) == pytest.approx(expected, rel=1e-9)
