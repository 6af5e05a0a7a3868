"""Flower's own strategies, given the same replies: five that average, and three aggregations."""

import logging

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.supercore.task_identity import TaskIdentity
from hand import rule_of
from test_aggregation import combine_points

from contrafed.server.base import Replies, Reply

SIZES = (3, 1, 4, 2, 5)


@pytest.fixture(autouse=True)
def _run(monkeypatch):
    """Flower's messages belong to a run."""
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", True)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def aggregate(strategy, model, updates, server_round):
    """Return the model (2,) of a Flower strategy after a round with these updates."""
    adaptive = isinstance(strategy, flower.FedAdam | flower.FedYogi | flower.FedAdagrad)
    strategy.current_arrays = {"w": model} if adaptive else ArrayRecord({"w": Array(model)})
    sent = Message(RecordDict(), dst_node_id=1, message_type="train")
    replies = []
    for update, size in zip(updates, SIZES, strict=False):
        content = {"arrays": ArrayRecord({"w": Array(model + update)}), "metrics": MetricRecord({"num-examples": size})}
        replies.append(Message(RecordDict(content), reply_to=sent))
    arrays, _ = strategy.aggregate_train(server_round, replies)
    return arrays["w"].numpy()


def draw_updates(rounds):
    return np.random.default_rng(0).normal(size=(rounds, len(SIZES), 2))


# Of Flower's FedAdam: its bias correction counts rounds from 1 and adds one.
CORRECTION = {"fedadam": lambda t: (1 - 0.99 ** (t + 1)) ** 0.5 / (1 - 0.9 ** (t + 1))}
ADAPTIVE = {"server_lr": 0.1, "beta1": 0.9, "epsilon": 1e-3}
THEIRS = {"eta": 0.1, "beta_1": 0.9, "tau": 1e-3}


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("fedavg", {"weights": "samples"}, flower.FedAvg()),
        ("fedavgm", {"server_lr": 0.5, "server_momentum": 0.9}, flower.FedAvgM(server_learning_rate=0.5, server_momentum=0.9)),
        ("fedadam", ADAPTIVE | {"beta2": 0.99}, flower.FedAdam(**THEIRS, beta_2=0.99)),
        ("fedyogi", ADAPTIVE | {"beta2": 0.99}, flower.FedYogi(**THEIRS, beta_2=0.99)),
        ("fedadagrad", ADAPTIVE | {"beta1": 0.0}, flower.FedAdagrad(eta=0.1, tau=1e-3)),
    ],
)
def test_a_strategy_makes_flowers_steps(name, settings, theirs):
    """But for FedAdam's bias correction, and with v = 0 at the start, where ours is eps^2."""
    rule, correct = rule_of(name, SIZES, {"model/w": (2,)}, **settings), CORRECTION.get(name, lambda t: 1.0)
    if name in ("fedadam", "fedyogi", "fedadagrad"):
        rule.state["second"] = {"w": torch.zeros(2, dtype=torch.float64)}
    model = np.array([1.0, -2.0])
    for number, updates in enumerate(draw_updates(4), 1):
        start = {"w": torch.tensor(model)}
        begin = rule.broadcast(start)
        replies = [
            Reply(k, {"model/w": begin["model/w"] + torch.tensor(update)}, size, {}, begin)
            for k, (update, size) in enumerate(zip(updates, SIZES, strict=True))
        ]
        ours = rule.next_model(start, Replies(replies))["w"].numpy() - model
        np.testing.assert_allclose(ours * correct(number), aggregate(theirs, model, updates, number) - model, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("median", {}, flower.FedMedian()),
        ("trimmed_mean", {"trim": 0.3}, flower.FedTrimmedAvg(beta=0.3)),
        ("krum", {"assumed": 0.3}, flower.Krum(num_malicious_nodes=1)),
    ],
)
def test_an_aggregation_is_flowers(name, settings, theirs):
    for updates in draw_updates(4):
        ours = combine_points(name, updates.tolist(), SIZES, **settings)
        np.testing.assert_allclose(ours, aggregate(theirs, np.zeros(2), updates, 1), rtol=1e-6)
