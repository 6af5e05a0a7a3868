"""FedGH: the server's steps by hand, its messages, and both models that are evaluated."""

import torch
from helpers import close, config_of, digits_run, same, workspace_of

from contrafed.server.base import Replies, Reply
from contrafed.strategies.fedgh import Config, FedGH

ROUNDS = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5]]
SHORT_TRAINING = {"epochs": 1}


def train_head(rows, head, lr=1.0, batch=1):
    """Return the head (C, D) after the server's pass over the clients' (mean, count) tables."""
    rule = FedGH.__new__(FedGH)
    rule.config, rule.shared_names = Config(server_lr=lr, server_batch=batch), ["classifier.weight"]
    replies = Replies(
        Reply(k, {"proto/mean": torch.tensor(means), "proto/count": torch.tensor(counts)}, 1, {})
        for k, (means, counts) in enumerate(rows)
    )
    return rule.aggregate({"classifier.weight": torch.tensor(head)}, replies)["classifier.weight"]


def test_the_servers_step_by_hand():
    """z (1, 0), label 0, head 0 without bias, lr 1: W_00 0.5, W_10 -0.5."""
    head = train_head([([[1.0, 0.0], [9.0, 9.0]], [3.0, 0.0])], [[0.0, 0.0], [0.0, 0.0]])
    assert head.tolist() == [[0.5, 0.0], [-0.5, 0.0]]


def test_prototypes_are_steps_one_after_another_in_order_of_client_and_class():
    both = [([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0])]
    one = train_head(both, [[0.0, 0.0], [0.0, 0.0]])
    first = train_head([([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0])], [[0.0, 0.0], [0.0, 0.0]])
    then = train_head([([[1.0, 0.0], [0.0, 1.0]], [0.0, 1.0])], first.tolist())
    torch.testing.assert_close(one, then, rtol=1e-12, atol=1e-12)
    assert train_head(both, [[0.0, 0.0], [0.0, 0.0]], batch=2).tolist() == [[0.25, -0.25], [-0.25, 0.25]]


def test_nothing_present_and_a_rate_of_zero_leave_the_head():
    start = [[0.3, -0.1], [0.2, 0.4]]
    assert train_head([([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])], start).tolist() == torch.tensor(start).tolist()
    assert train_head([], start).tolist() == torch.tensor(start).tolist()
    still = train_head([([[1.0, 0.0], [0.0, 1.0]], [1.0, 1.0])], start, lr=0.0)
    assert torch.equal(still, torch.tensor(start).double())


def test_no_body_tensor_crosses_and_the_overhead_is_the_papers():
    workspace = workspace_of(config_of("strategy=fedgh", "model=cnn", "dataset=digits"))
    down, up = workspace.client_class.message_spec(workspace.model, workspace.config)
    assert set(down) == {"model/classifier.weight", "model/classifier.bias"}
    assert set(up) == {"proto/mean", "proto/count"}
    size = sum(torch.Size(s).numel() for s in (down | {"mean": up["proto/mean"]}).values())
    assert size == 1280 + 1290  # |Omega| + |pi| with 128 features and 10 classes


def test_stacked_equals_alone_and_both_moments_are_evaluated():
    alone, _ = digits_run("fedgh", schedule=ROUNDS, num_rounds=4, local=SHORT_TRAINING)
    stacked, _ = digits_run("fedgh", schedule=ROUNDS, num_rounds=4, local=SHORT_TRAINING, stack_size=4)
    close(alone[-1], stacked[-1])
    assert not same(alone[0], alone[-1])

    workspace = workspace_of(config_of("strategy=fedgh", "num_clients=8", "model=mlp", "dataset.merge_splits=true"))
    client = workspace.client_class(workspace, [0])
    received = {f"model/{n}": workspace.initial[n] for n in ("classifier.weight", "classifier.bias")}
    (update,) = client.update([received], 1)
    client.client_states = [update.client_state]
    (evaluated,) = client.evaluate_clients([received], 1)
    assert set(evaluated.metrics) == {"loss", "accuracy", "trained/loss", "trained/accuracy"}
    assert evaluated.metrics["loss"] != evaluated.metrics["trained/loss"]
    assert torch.equal(evaluated.model["classifier.weight"], received["model/classifier.weight"])
