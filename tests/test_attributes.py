"""What a strategy keeps beside its state, which of its attributes are taken, and what it must not change in place."""

import threading

import numpy as np
import pytest
import torch
from helpers import digits_run, same
from test_strategy_faults import NAME, aggregating, rule, stops  # noqa: F401 (a fixture)
from torch import nn

from contrafed.core.errors import RunStopped
from contrafed.server import checks
from contrafed.server.prototypes import Prototypes
from contrafed.strategies.fedavg import FedAvg

ROUNDS = [range(2), [], range(2)]


def train(self):
    with torch.no_grad():
        self.kept.weight.add_(1)


@pytest.mark.parametrize(
    ("begun", "change"),
    [
        (lambda: 0, lambda self: setattr(self, "kept", self.kept + 1)),
        (dict, lambda self: self.kept.update(a=torch.ones(2))),
        (lambda: [{"a": {1}}], lambda self: self.kept[0]["a"].add(2)),
        (lambda: torch.zeros(2), lambda self: self.kept.add_(1)),
        (lambda: torch.zeros(200_000), lambda self: self.kept.add_(1)),
        (lambda: np.zeros(200_000), lambda self: self.kept.__iadd__(1)),
        (lambda: np.random.default_rng(0), lambda self: self.kept.random()),
        (lambda: torch.Generator(), lambda self: torch.rand(1, generator=self.kept)),
        (lambda: nn.Linear(2, 2), train),
    ],
)
def test_a_round_changes_only_the_state(stops, begun, change):  # noqa: F811
    """A resumed run would begin with the value of ``setup``."""
    stops("Mine", setup=lambda self: setattr(self, "kept", begun()), aggregate=aggregating(change))


def test_a_selection_changes_only_the_state(stops):  # noqa: F811
    def select(self, server_round):
        return np.sort(self.rng.permutation(2))

    stops("Mine", setup=lambda self: setattr(self, "rng", np.random.default_rng(0)), select=select)


def test_nor_does_a_round_change_a_table_of_the_class(stops):  # noqa: F811
    stops("Mine", table={}, aggregate=aggregating(lambda self: self.table.update(a=1)))


def test_constants_and_what_is_set_back_may_be_attributes():
    def setup(self):
        self.numbers, self.text, self.parts = np.arange(3.0), "a", {"a": torch.ones(2), 1: [None]}
        self.network, self.function, self.lock = nn.Linear(2, 2), lambda x: x, threading.Lock()
        self.table = self.state["table"] = {}
        self.prototypes = Prototypes(self.state, {"proto/mean": (2, 2), "proto/valid": (2,)})
        self.drawn = {}

    def select(self, server_round):
        clients = FedAvg.select(self, server_round)
        self.drawn["clients"] = clients
        return clients

    def aggregate(self, model, replies):
        self.table["rounds"] = self.table.get("rounds", 0) + len(self.drawn)
        self.state["means"] = self.state["means"] + 1
        self.parts = {"a": torch.ones(2), 1: [None]}
        self.drawn = {}
        return self.mean(model, replies)

    made = rule(setup=setup, select=select, aggregate=aggregate)
    _, strategy = digits_run("fedavg", 3, clients=2, rule=made, schedule=ROUNDS)
    assert strategy.state["table"] == {"rounds": 2}


@pytest.mark.parametrize(
    ("name", "value"),
    [("time", 0.0), ("personal", {}), ("settings", {}), ("buffers", {}), ("received", {}), ("rate", 0.1), ("mean", {})],
)
def test_an_attribute_of_the_base_class_is_not_replaced(stops, expect_error, name, value):  # noqa: F811
    with expect_error("Mine"):
        digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: setattr(self, name, value)))
    if not hasattr(FedAvg, name):
        stops("Mine", aggregate=aggregating(lambda self: setattr(self, name, value)))
        with expect_error("Mine"):
            digits_run("fedavg", 1, clients=2, rule=rule(**{name: value}))


def test_the_state_may_be_another_dictionary(expect_error):
    made = rule(setup=lambda self: setattr(self, "state", {"a": 1}), has_global_model=False)
    _, strategy = digits_run("fedavg", 1, clients=2, rule=made)
    assert strategy.state == {"a": 1}
    with expect_error("Mine"):
        digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: setattr(self, "state", None)))


def average_in_place(self, model, replies):
    """Keep an average over rounds in the tensors of the first round's model."""
    if "ema" in self.state:
        self.state["ema"][NAME].mul_(0.9)
    self.state.setdefault("ema", dict(model))
    return self.mean(model, replies)


def change_received(self, model, replies):
    replies[0].received[f"model/{NAME}"].add_(1)
    return self.mean(model, replies)


@pytest.mark.parametrize(
    "aggregate",
    [
        lambda self, model, replies: {NAME: model[NAME].mul_(0.5)},
        lambda self, model, replies: {NAME: model[NAME].view(-1).add_(1)},
        change_received,
        average_in_place,
    ],
)
def test_no_tensor_that_clients_have_received_is_changed_in_place(expect_error, aggregate):
    """In this process clients have the same tensors, and with other engines copies."""
    with expect_error("Mine.aggregate", RunStopped):
        digits_run("fedavg", 2, clients=2, rule=rule(aggregate=aggregate))


@pytest.mark.parametrize("name", ["broadcast", "per_client_broadcast"])
def test_a_broadcast_does_not_change_the_model_in_place(expect_error, name):
    def change(self, model, *others):
        model[NAME].mul_(0.5)
        return getattr(FedAvg, name)(self, model, *others)

    with expect_error(f"Mine.{name}", RunStopped):
        digits_run("fedavg", 1, clients=2, rule=rule(**{name: change}))


def test_an_evaluation_does_not_change_the_model_in_place(expect_error):
    made = rule(eval_model=lambda self, model: {n: w.mul_(0.5) for n, w in model.items()})
    models, strategy = digits_run("fedavg", 1, clients=2, rule=made)
    with expect_error("Mine.eval_model", RunStopped):
        checks.eval_model(strategy, models[1])


def test_a_copy_may_be_changed_in_place_and_so_may_the_dictionary_of_the_model():
    def aggregate(self, model, replies):
        ema = self.state.setdefault("ema", {name: value.clone() for name, value in model.items()})
        for name, value in self.mean(model, replies).items():
            ema[name].mul_(0.5).add_(0.5 * value)
            model[name] = value.double()
        return model

    schedule = ROUNDS[::2]
    made = rule(aggregate=aggregate)
    models, strategy = digits_run("fedavg", 2, clients=2, rule=made, schedule=schedule, dtype=torch.float32)
    expected, _ = digits_run("fedavg", 2, clients=2, schedule=schedule, dtype=torch.float32)
    assert all(same(ours, theirs) for ours, theirs in zip(models, expected, strict=True))
    ema = 0.5 * (0.5 * (models[0][NAME] + models[1][NAME]) + models[2][NAME])
    torch.testing.assert_close(strategy.state["ema"][NAME], ema)
