"""Common properties of methods that average whole models: a zero rate changes nothing, the messages, and the client state."""

import numpy as np
import pytest
import torch
from hand import EPOCH
from helpers import (
    METHODS,
    Schedule,
    close,
    config_of,
    digits_run,
    make_local_training,
    run_scalar,
    run_strategy,
    same,
    workspace_of,
)

from contrafed.clients.fedavg import FedAvgClient
from contrafed.engines.grid import LocalGrid
from contrafed.training.base import LocalError
from contrafed.training.batches import Batches, draw_batches


def test_what_is_remembered_must_be_in_the_memory_that_a_client_begins_with():
    """Otherwise one engine would keep it and another not."""

    class Remembers(FedAvgClient):
        def local_update(self, stack):
            stack.state["last"] = torch.zeros(len(stack), 1)
            return super().local_update(stack)

    workspace = workspace_of(config_of("strategy=fedavg", "num_clients=4", "model=mlp"))
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    with pytest.raises(LocalError, match="init_client_state must return a value for last, which local_update remembers"):
        Remembers(workspace, [0]).update([received], 1)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"extra": torch.ones(1)}, "what message_spec declares, which extra is not"),
        (
            {"model/classifier.bias": torch.ones(1, 3)},
            r"classifier.bias of shape \(1, 10\), as message_spec declares it, not \(1, 3\)",
        ),
        ({"model/classifier.bias": torch.ones(1, 10).int()}, "classifier.bias in float32 or float64, not torch.int32"),
    ],
)
def test_what_is_sent_must_be_what_messages_declares(sent, said):
    """Otherwise every reply would be rejected, on some engines without a reason."""

    class Sends(FedAvgClient):
        def local_update(self, stack):
            return super().local_update(stack) | sent

    workspace = workspace_of(config_of("strategy=fedavg", "num_clients=4", "model=mlp"))
    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    with pytest.raises(LocalError, match=f"local_update must return .*{said}"):
        Sends(workspace, [0]).update([received], 1)


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
    [("fedavgm", {"server_momentum": 0.0}), ("fedagm", {"server_momentum": 0.0, "local": {"proximal_weight": 0.0}})],
)
def test_neutral_rules_equal_fedavg(name, neutral):
    reference, _ = digits_run("fedavg", weights="uniform")
    models, _ = digits_run(name, weights="uniform", **neutral)
    close(models[-1], reference[-1])


@pytest.mark.parametrize("name", METHODS)
def test_no_learning_leaves_the_model(name):
    """G3, with histories and buffers of constants."""
    models, _ = digits_run(name, 3, clients=40, schedule=[range(5)] * 3, local={"lr": 1e-300, "iterations": 5, "epochs": None})
    close(models[0], models[-1], 1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_messages_hold_what_is_declared_and_nothing_else(name):
    seen = []

    class Spy:
        def __init__(self, grid):
            self.grid = grid

        def __getattr__(self, attribute):
            return getattr(self.grid, attribute)

        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = list(self.grid.send_and_receive(messages, timeout=timeout))
            seen.extend(zip(messages, replies, strict=True))
            return replies

    config = config_of(f"strategy={name}", "num_clients=40", "model=mlp")
    config["strategy"]["local"] |= {"iterations": 2, "epochs": None}
    workspace = workspace_of(config)
    run_strategy(workspace, config, Schedule([range(3)] * 2), 2, wrap=Spy)
    shapes = {n: tuple(p.shape) for n, p in workspace.initial.items()}
    group = "delta" if name == "pmfl" else "model"
    assert len(seen) == 6
    for message, reply in seen:
        assert set(message.content) == {"arrays", "config"}
        assert {n: tuple(a.shape) for n, a in message.content["arrays"].items()} == {f"model/{n}": s for n, s in shapes.items()}
        assert set(message.content["config"]) == {"server-round", "settings", "cost"}
        assert set(reply.content) == {"arrays", "metrics"}
        assert {n: tuple(a.shape) for n, a in reply.content["arrays"].items()} == {f"{group}/{n}": s for n, s in shapes.items()}


@pytest.mark.parametrize(
    ("name", "stateless"), [("fedavg", True), ("fedprox", True), ("fedau", True), ("moon", False), ("pmfl", False)]
)
def test_only_declared_memory_is_kept(name, stateless):
    config = config_of(f"strategy={name}", "num_clients=40", "model=mlp")
    grid = LocalGrid(40, 1)
    workspace = workspace_of(config)
    run_strategy(workspace, config, Schedule([[0, 2], [2]]), 2, grid=grid)
    assert set(grid.client_states) == (set() if stateless else {1000, 1002})
    assert workspace.client_class.has_client_state(workspace.model, workspace.config) == (not stateless)


def test_a_client_that_sat_out_has_the_memory_it_left_with():
    config = config_of("strategy=pmfl", "num_clients=3", "model=mlp")
    first, later = LocalGrid(3, 1), LocalGrid(3, 1)
    run_strategy(workspace_of(config), config, Schedule([[0, 1]]), 1, grid=first)
    run_strategy(workspace_of(config), config, Schedule([[0, 1]] + [[1, 2]] * 10), 11, grid=later)
    left, kept = (grid.client_states.get(1000) for grid in (first, later))
    assert set(left) == set(kept)
    assert all(np.array_equal(left[n].numpy(), kept[n].numpy()) for n in left)


def test_the_same_seed_is_the_same_run():
    a, b = (digits_run("pmfl", 2, clients=40, schedule=[range(5)] * 2)[0] for _ in range(2))
    assert same(a[-1], b[-1])
    local_training = make_local_training(iterations=5)
    draws = [draw_batches(local_training, np.arange(40), 3, "batches", 7, 2) for _ in range(2)]
    assert all(np.array_equal(x, y) for x, y in zip(*draws, strict=True))
    other = draw_batches(local_training, np.arange(40), 3, "batches", 8, 2)
    assert not np.array_equal(draws[0][0], other[0])


def test_methods_share_their_batches(monkeypatch):
    """Return the examples of every step of two rounds, for methods with equal training settings."""
    drawn, seen = Batches.draw, {}

    def record_batches(workspace, local_training, stack, purpose):
        found = drawn(workspace, local_training, stack, purpose)
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
