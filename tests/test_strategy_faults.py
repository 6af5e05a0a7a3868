"""Mistakes in a user's strategy: each gives one line with the strategy's name, before its work is lost or used."""

import json
from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch
from helpers import config_of, digits_run, resolve_and_try, same
from omegaconf import OmegaConf
from test_external_package import CLIENT, METHOD, RULE, write

from contrafed.config.compose import compose_job
from contrafed.config.run_config import resolve
from contrafed.core import registry
from contrafed.core.errors import RunStopped
from contrafed.data.participation import Participation, Selection
from contrafed.runs.run import run
from contrafed.server.base import FederatedStrategy
from contrafed.server.replies import AbsentError, Replies, Reply
from contrafed.strategies.fedavg import FedAvg

NAME = "classifier.bias"
QUICK_RUN = ["strategy=fedavg", "engine=local", "num_clients=2", "participation=full", "model=mlp"]


def rule(**functions):
    """Return FedAvg with other functions, as a class with the name Mine."""
    return type("Mine", (FedAvg,), functions)


def aggregating(change):
    """Return an ``aggregate`` that calls ``change(strategy)`` before it returns the mean."""

    def aggregate(self, model, replies):
        change(self)
        return self.mean(model, replies)

    return aggregate


@pytest.fixture
def stops(expect_error):
    """Expect the error with which a round of two clients ends under a strategy, and return the run's status."""

    def check(key, **functions):
        with expect_error(key, RunStopped) as found:
            digits_run("fedavg", 1, clients=2, rule=rule(**functions))
        return found.value.status

    return check


@pytest.fixture
def unsent(expect_error):
    """Expect the error about tensors that clients cannot use: before the first round's training, and in the next round."""

    def check(key, **functions):
        with expect_error(key) as first:
            digits_run("fedavg", 1, clients=2, rule=rule(**functions))
        ((name, function),) = functions.items()

        def later(self, *args):
            return (function if self.round.server_round > 1 else getattr(FedAvg, name))(self, *args)

        with pytest.raises(RunStopped) as second:
            digits_run("fedavg", 2, clients=2, rule=rule(**{name: later}))
        assert str(second.value) == f"round 2: {first.value}"

    return check


@pytest.mark.parametrize(
    "change",
    [
        lambda mean: None,
        lambda mean: list(mean.values()),
        lambda mean: {f"model/{n}": v for n, v in mean.items()},
        lambda mean: mean | {0: mean[NAME]},
        lambda mean: mean | {NAME: mean[NAME].numpy()},
        lambda mean: mean | {NAME: mean[NAME].sum()},
        lambda mean: mean | {NAME: 0.5},
        # Others than floating-point numbers would be cast to the model's type, and rounded or lose their imaginary part.
        lambda mean: {n: v.long() for n, v in mean.items()},
        lambda mean: {n: v.to(torch.complex64) for n, v in mean.items()},
    ],
)
def test_what_is_no_model_is_refused_before_it_is_taken(stops, change):
    status = stops("Mine.aggregate", aggregate=lambda self, model, replies: change(self.mean(model, replies)))
    assert status == "failed"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_model_that_is_not_finite_ends_the_run_as_the_rules_fault(expect_error, value):
    """Also one that is finite in the strategy's float64, but not in the model's float32."""

    def aggregate(self, model, replies):
        mean = self.mean(model, replies)
        if self.round.server_round == 2:
            mean[NAME][3] = value
        return mean

    with expect_error("Mine.aggregate", RunStopped) as found:
        digits_run("fedavg", 2, clients=2, rule=rule(aggregate=aggregate), dtype=torch.float32)
    assert found.value.status == "diverged"


def test_what_would_last_beside_the_state_is_refused(stops):
    """A resumed run would start it anew, with other numbers."""

    def aggregate(self, model, replies):
        self.ema = self.mean(model, replies)
        return self.ema

    stops("Mine", aggregate=aggregate)
    stops("Mine", aggregate=aggregate, setup=lambda self: setattr(self, "ema", None))


def test_replies_are_not_changed_in_place(stops):
    """A client's state has the same tensors in this process."""

    def aggregate(self, model, replies):
        total = replies.models()[0]
        for other in replies.models()[1:]:
            for name in total:
                total[name] += other[name]
        return {name: value / len(replies) for name, value in total.items()}

    assert stops("Mine.aggregate", aggregate=aggregate) == "failed"


def test_what_a_rule_leaves_out_stays_and_large_numbers_are_finite():
    made = rule(aggregate=lambda self, model, replies: {NAME: torch.full((10,), 1e30)})
    models, _ = digits_run("fedavg", 1, clients=2, rule=made, dtype=torch.float32)
    assert (models[1][NAME] == 1e30).all()
    assert models[1].keys() == models[0].keys()
    assert all(torch.equal(models[1][name], value) for name, value in models[0].items() if name != NAME)


def test_a_run_that_its_rule_ends_is_one_line_and_keeps_its_checkpoints(tmp_path, monkeypatch, expect_error):
    real = FedAvg.aggregate

    def aggregate(self, model, replies):
        return {n: v * torch.nan if self.round.server_round == 2 else v for n, v in real(self, model, replies).items()}

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    small = ["num_rounds=3", "model.hidden=[8]", "strategy.local.iterations=1", "checkpoint_every=1", "resume=latest"]
    wanted = config_of(*QUICK_RUN, *small, f"output_dir={tmp_path}/run")
    with expect_error("FedAvg.aggregate", RunStopped):
        run(wanted)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("diverged", 1)
    monkeypatch.undo()
    assert run(wanted)["status"] == "finished"


@pytest.mark.parametrize(
    "eval_model",
    [
        lambda self, model: None,
        lambda self, model: {n: v for n, v in model.items() if n != NAME},
        lambda self, model: model | {"head": torch.ones(1)},
    ],
)
def test_the_model_that_a_rule_has_scored_is_whole(monkeypatch, expect_error, eval_model):
    monkeypatch.setattr(FedAvg, "eval_model", eval_model)
    with expect_error("FedAvg.eval_model"):
        resolve_and_try(config_of("strategy=fedavg"))


def test_a_rule_that_has_half_a_model_scored_later_ends_the_run_and_leaves_what_there_is(monkeypatch, tmp_path, expect_error):
    monkeypatch.setattr(FedAvg, "eval_model", lambda self, model: model if self.round.server_round < 1 else {})
    with expect_error("FedAvg.eval_model", RunStopped):
        run(config_of(*QUICK_RUN, "num_rounds=2", f"output_dir={tmp_path}/run"))
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("sums", ["mean", "weighted_sum", "weighted_terms"])
def test_a_sum_of_what_no_client_sends_names_what_they_send(stops, sums):
    stops("Mine.aggregate", aggregate=lambda self, model, replies: getattr(replies, sums)("modle", np.ones(len(replies))))


def test_clients_may_send_nothing_or_none_of_the_model(expect_error):
    one = np.ones(1)
    assert Replies([Reply(0, {}, 1, {})]).mean("proto", one) == {}
    prototypes = Replies([Reply(0, {"proto/mean": torch.ones(2)}, 1, {})])
    assert prototypes.mean("model", one) == {}  # a method whose encoder has no parameters
    assert prototypes.mean("proto", one).keys() == {"mean"}
    with expect_error(kind=AbsentError):
        prototypes.mean("prot", one)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("metrics", "x", torch.tensor([1.0, 2.0])),
        ("metrics", "x", torch.tensor(1.0)),
        ("metrics", "x", np.float32(1)),
        ("metrics", "x", [1.0]),
        ("metrics", "x", True),
        ("metrics", "x", np.inf),
        ("metrics", 1, 0.5),
        ("client_metrics", 1, ([0], [1])),
        ("client_metrics", "x", ([0, 1], ["a", "b"])),
        ("client_metrics", "x", ([0.0, 1.0], [1, 2])),
        ("client_metrics", "x", ([0], torch.ones(1))),
        ("client_metrics", "x", ([0, 1], [0.5])),
        ("client_metrics", "x", ([0, 1], np.ones((2, 1)))),
        ("client_metrics", "x", (0, 0.5)),
        ("client_metrics", "x", np.ones(2)),
        ("client_metrics", "x", {0: 0.5}),
    ],
)
def test_what_a_rule_logs_has_a_name_and_numbers(stops, kind, name, value):
    stops("Mine", aggregate=aggregating(lambda self: getattr(self.round, kind).update({name: value})))


def test_a_metric_may_be_nan():
    made = rule(aggregate=aggregating(lambda self: self.round.metrics.update(x=np.nan, y=np.float64(2), z=3)))
    _, strategy = digits_run("fedavg", 1, clients=2, rule=made)
    assert (strategy.round.metrics["y"], strategy.round.metrics["z"]) == (2, 3)


def test_what_a_rule_says_of_its_round_is_not_replaced_by_the_clients_means():
    own = rule(aggregate=aggregating(lambda self: self.round.metrics.update(loss=-1.0)))
    _, strategy = digits_run("fedavg", 1, clients=2, rule=own)
    assert strategy.round.metrics == {"loss": -1.0}


@pytest.mark.parametrize("weights", [np.ones(3), [0.5, 0.5], np.array(["a", "b"])])
def test_weights_that_are_logged_are_a_number_for_each_client(tmp_path, monkeypatch, expect_error, weights):
    monkeypatch.setattr(FedAvg, "client_weights", lambda self: weights)
    with expect_error("FedAvg.client_weights", RunStopped):
        run(config_of(*QUICK_RUN, "num_rounds=1", "log=[weights]", f"output_dir={tmp_path}/run"))


Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        [1, {"g": object()}],
        {(0, 1): torch.ones(1)},
        np.array([None]),
        np.ones(1, "uint16"),
        np.ones(1, ">f4"),
        [np.complex64(1j)],
        torch.ones(1, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        Pair(1, 2),
        defaultdict(int),
    ],
)
def test_what_no_checkpoint_holds_is_refused_before_the_run_and_in_the_round_that_brings_it(expect_error, stops, value):
    with expect_error("Mine"):
        digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: self.state.update(f=value)))
    stops("Mine", aggregate=aggregating(lambda self: self.state.update(f=value)))


def test_a_state_may_hold_what_a_checkpoint_does():
    held = {"a": {7: {"w": torch.ones(1)}}, "b": [np.zeros(2), (1, np.int64(2))], "c": None, "d": "text", "e": True, "f": 0.5}
    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: self.state.update(held)))
    assert strategy.state.keys() == held.keys()


@pytest.mark.parametrize(
    "clients", [[0, 1, 99], [-1, 0], [1, 0, 1], np.array([0.0, 1.0]), np.array([True, False]), [[0, 1]], None]
)
def test_clients_that_there_are_not_cannot_be_selected(stops, clients):
    stops("Mine.select", select=lambda self, server_round: clients)


@pytest.mark.parametrize("clients", [[], [1, 0], np.array([1], dtype=np.uint8)])
def test_a_selection_is_sorted_and_may_be_a_list_or_empty(clients):
    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(select=lambda self, server_round: clients))
    assert strategy.round.participants.tolist() == sorted(clients)


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({f"model/{NAME}": torch.zeros(3)}, "strategy.server"),
        ({f"model/{NAME}": np.zeros(10)}, "Mine"),
        ([torch.zeros(10)], "Mine"),
    ],
)
def test_what_one_client_alone_receives_is_looked_at(unsent, own, key):
    unsent(key, per_client_broadcast=lambda self, model, client, evaluating: own if client else None)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda sent: None, "Mine"),
        (lambda sent: {n: v.sum() for n, v in sent.items()}, "strategy.server"),
        (lambda sent: {n: v for n, v in sent.items() if NAME not in n}, "strategy.server"),
        (lambda sent: {n.removeprefix("model/"): v for n, v in sent.items()}, "strategy.server"),
        (lambda sent: sent | {"extra/x": 1}, "Mine"),
        (lambda sent: sent | {"modl/x": torch.ones(1)}, "Mine"),
        (lambda sent: sent | {f"model/{NAME}": torch.arange(10)}, "Mine"),
    ],
)
def test_what_all_clients_receive_is_looked_at(unsent, change, key):
    unsent(key, broadcast=lambda self, model: change(FedAvg.broadcast(self, model)))


def test_what_the_broadcast_lacks_may_come_with_what_each_client_alone_receives():
    whole = lambda self, model, client, evaluating: FedAvg.broadcast(self, model)  # noqa: E731
    models, _ = digits_run("fedavg", 1, clients=2, rule=rule(broadcast=lambda self, model: {}, per_client_broadcast=whole))
    assert same(models[1], digits_run("fedavg", 1, clients=2)[0][1])


def test_a_rule_without_aggregate_is_none(monkeypatch, expect_error):
    monkeypatch.setattr(FedAvg, "aggregate", FederatedStrategy.aggregate)
    with expect_error("strategy.server"):
        resolve_and_try(config_of("strategy=fedavg"))


def raise_error(cls, config, client, participation):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("check", "key"), [(classmethod(raise_error), "strategy.server"), (raise_error, "contrafed.strategies.fedavg")]
)
def test_a_check_that_goes_wrong_itself_is_one_line(monkeypatch, expect_error, check, key):
    monkeypatch.setattr(FedAvg, "check", check)
    registry.check_overrides.cache_clear()  # of the class as it was
    with expect_error(key):
        resolve_and_try(config_of("strategy=fedavg"))


FUNCTION_OF_METHOD = "    @classmethod\n    def message_spec(cls, model, config):\n        "
FUNCTION_OF_RULE = "    def setup(self):\n        "
BROADCAST = "    def broadcast(self, model):\n        "
OWN_BROADCAST = "    def per_client_broadcast(self, model, client, evaluating):\n        "


@pytest.mark.parametrize(
    ("half", "more", "key"),
    [
        ("method", "    upload = 'weights'", "strategy"),
        ("method", FUNCTION_OF_METHOD + "return config.nothing", "strategy"),
        ("rule", FUNCTION_OF_RULE + "raise ValueError('a\\nslip')", "strategy.server"),
        ("rule", FUNCTION_OF_RULE + "self.state['f'] = {1}", "MyRule"),
        ("rule", BROADCAST + "return model['x']", "strategy.server"),
        ("rule", BROADCAST + "pass", "MyRule"),
        ("rule", BROADCAST + "return {n: v.sum() for n, v in super().broadcast(model).items()}", "strategy.server"),
        ("rule", OWN_BROADCAST + "return self.nothing", "strategy.server"),
    ],
)
def test_what_can_be_told_before_a_run_is(on_path, expect_error, half, more, key):
    write(on_path / "my_package" / "__init__.py", "")
    write(on_path / "yamls" / "strategy" / "mine.yaml", METHOD)
    for name, text in (("method", CLIENT), ("rule", RULE)):
        write(on_path / "my_package" / f"my_{name}.py", text + (more if name == half else ""))
    job = compose_job(["strategy=mine", "num_clients=4", "model=mlp", "model.hidden=[8]"], on_path / "yamls")
    with expect_error(key):
        resolve_and_try(OmegaConf.to_container(job, resolve=True))


@pytest.mark.parametrize(
    "presence", [0.5, np.ones(3), [1.0] * 4, np.ones(4, dtype=bool), np.full(4, 50.0), np.array([0.5, 0.5, np.nan, 1])]
)
def test_a_presence_that_is_no_shares_is_refused(expect_error, presence):
    pattern = type("Mine", (Participation,), {"presence": lambda self: presence})(
        Selection(None, 0.0, None, None, "drop", 0.0), None, 4, 0
    )
    with expect_error("Mine.presence"):
        pattern.probability()


def test_a_presence_is_looked_at_before_a_run(monkeypatch, expect_error):
    monkeypatch.setattr("contrafed.partitions.participation.bernoulli.Bernoulli.presence", lambda self: 0.5)
    with expect_error("Bernoulli.presence"):
        resolve(config_of("strategy=fedavg", "strategy.weights=known_probability", "num_clients=4", "participation=bernoulli"))
