"""Mistakes in a user's code that would pass silently or end in a traceback: each gives one line."""

from dataclasses import make_dataclass, replace

import numpy as np
import pytest
import torch
from helpers import config_of, digits_run, resolve_and_try
from test_method_faults import CLIENTS, assert_refused, line_of
from test_strategy_faults import get_stop, rule
from torch import nn

from contrafed.clients.fedavg import FedAvgClient
from contrafed.config.run_config import _check_local_training, resolve
from contrafed.core.client_run import choose
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.split_model import build_model
from contrafed.data.checks import check_lazy
from contrafed.data.federation import load_federation
from contrafed.data.participation import Participation, make_participation
from contrafed.data.partition import Partition
from contrafed.models import mlp
from contrafed.partitions.participation import full
from contrafed.partitions.partitioners import iid
from contrafed.runs.run import run
from contrafed.server.base import FederatedStrategy
from contrafed.strategies.fedavg import FedAvg


def resolved_fault(*overrides):
    """Return the error of a configuration before anything is loaded."""
    with pytest.raises(UserError) as found:
        resolve_and_try(config_of("strategy=fedavg", *overrides))
    assert "\n" not in str(found.value)
    return str(found.value)


# ----------------------------------------------------------------------------------------------------------------- strategies


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda model: {n: v.long() for n, v in model.items()}, "is floating-point numbers, got int64"),
        (lambda model: {n: v.to(torch.complex64) for n, v in model.items()}, "is floating-point numbers, got complex64"),
    ],
)
def test_a_model_is_of_floating_point_numbers(made, said):
    """Others would be cast to the model's type, and rounded or lose their imaginary part."""
    assert get_stop(rule(aggregate=lambda self, model, replies: made(model)))[0].endswith(said)


def test_what_a_rule_says_of_its_round_is_not_replaced_by_the_clients_means():
    def aggregate(self, model, replies):
        self.round.metrics["loss"] = -1.0
        return self.mean(model, replies)

    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(aggregate=aggregate))
    assert strategy.round.metrics == {"loss": -1.0}


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (
            {"client_metrics": {"x": ([0, 1], ["a", "b"])}},
            "client_metrics['x'] must be (clients, values), numbers both, got int64, <U1",
        ),
        (
            {"client_metrics": {"x": ([0.0, 1.0], [1, 2])}},
            "client_metrics['x'] must be (clients, values), numbers both, got float64, int64",
        ),
        (
            {"client_metrics": {"x": ([0], torch.ones(1))}},
            "client_metrics['x'] must be (clients, values), arrays or lists, got a Tensor",
        ),
        ({"client_metrics": {1: ([0], [1])}}, "metrics of self.round have text for their names, got 1"),
        ({"metrics": {1: 0.5}}, "metrics of self.round have text for their names, got 1"),
    ],
)
def test_what_a_rule_logs_has_a_name_and_numbers(metrics, said):
    def aggregate(self, model, replies):
        for kind, values in metrics.items():
            getattr(self.round, kind).update(values)
        return self.mean(model, replies)

    assert get_stop(rule(aggregate=aggregate))[0].endswith(said)


@pytest.mark.parametrize(
    ("weights", "got"), [(np.ones(3), "ndarray (3,)"), ([0.5, 0.5], "list"), (np.array(["a", "b"]), "ndarray (2,)")]
)
def test_weights_that_are_logged_are_a_number_for_each_client(tmp_path, monkeypatch, weights, got):
    monkeypatch.setattr(FedAvg, "client_weights", lambda self: weights)
    quick = (
        "strategy=fedavg",
        "engine=local",
        "num_clients=2",
        "num_rounds=1",
        "participation=full",
        "model=mlp",
        "log=[weights]",
    )
    with pytest.raises(RunStopped) as found:
        run(config_of(*quick, f"output_dir={tmp_path}/run"))
    assert str(found.value).startswith(f"round 1: FedAvg.client_weights must return (2,) numbers or None, got {got}")


@pytest.mark.parametrize(
    ("eval_model", "said"),
    [
        (lambda self, model: None, "got NoneType"),
        (lambda self, model: {n: v for n, v in model.items() if n != "classifier.bias"}, "classifier.bias is missing"),
        (lambda self, model: model | {"head": torch.ones(1)}, "unknown 'head'"),
    ],
)
def test_the_model_that_a_rule_has_scored_is_whole(monkeypatch, eval_model, said):
    monkeypatch.setattr(FedAvg, "eval_model", eval_model)
    assert resolved_fault().startswith(f"FedAvg.eval_model must return the whole model, tensors by name: {said}")


def test_a_rule_without_aggregate_is_none(monkeypatch):
    monkeypatch.setattr(FedAvg, "aggregate", FederatedStrategy.aggregate)
    said = "strategy.server=fedavg: FedAvg must define aggregate(self, model, replies), which returns the next global model"
    assert resolved_fault() == said


def raises(cls, config, client, participation):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (classmethod(raises), "strategy.server=fedavg: FedAvg.check: KeyError: 'x' (tests/test_own_faults.py, line "),
        (
            raises,
            "contrafed.strategies.fedavg: FedAvg.check must take (config, client, participation), "
            "as FederatedStrategy.check does, a class",
        ),
    ],
)
def test_a_check_that_goes_wrong_itself_is_one_line(monkeypatch, check, said):
    monkeypatch.setattr(FedAvg, "check", check)
    assert resolved_fault().startswith(said)


# --------------------------------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (
            lambda down, up: (down, up | {"x": [10]}),
            "must return shapes, tuples of whole numbers such as (10, 64), got [10] for x",
        ),
        (lambda down, up: (down, up | {"x": 10}), "must return shapes, tuples of whole numbers such as (10, 64), got 10 for x"),
        (
            lambda down, up: (down, up | {"x": (1.5,)}),
            "must return shapes, tuples of whole numbers such as (10, 64), got (1.5,) for x",
        ),
        (lambda down, up: down | up, "must return two dictionaries, what a client receives and what it sends, got dict"),
        (lambda down, up: ({}, up), "must have a client receive model/encoder."),
    ],
)
def test_what_a_client_declares_are_two_tables_of_shapes(monkeypatch, messages, said):
    inner = FedAvgClient.message_spec
    monkeypatch.setattr(FedAvgClient, "message_spec", classmethod(lambda cls, model, config: messages(*inner(model, config))))
    assert resolved_fault().startswith(f"strategy=fedavg: FedAvgClient.message_spec {said}")


def test_a_client_has_a_recipe_of_local_training(monkeypatch):
    choice = resolve(config_of("strategy=fedavg")).client.strategy
    bare = make_dataclass("Config", ["rho"], frozen=True)(0.5)
    said = r"Config of contrafed.clients.fedavg must have `local: LocalTraining` of contrafed.training.local_training"
    with pytest.raises(UserError, match=said):
        _check_local_training(replace(choice, config=bare), num_rounds=1)


@pytest.mark.parametrize("steps", [lambda self, examples: None, lambda self, examples: 1.5, lambda self, examples: self.n])
def test_how_long_a_client_works_is_a_number_of_steps(monkeypatch, tmp_path, steps):
    monkeypatch.setattr(FedAvgClient, "num_local_steps", steps)
    quick = ("strategy=fedavg", "engine=local", "num_clients=2", "num_rounds=1", "participation=full", "model=mlp")
    said = r"^FedAvgClient.num_local_steps(: AttributeError: .*| must return a whole number of steps.*)$"
    with pytest.raises((RunStopped, UserError), match=said):
        run(config_of(*quick, f"output_dir={tmp_path}/run"))


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(("value", "got"), [(torch.tensor(1.0), "shape ()"), (torch.ones(7), "shape (7,)"), (1.0, "float")])
def test_what_a_loss_takes_as_constant_is_clients_first(clients, value, got):
    """With another shape a single client would take the first number, and each of seven in a stack another."""

    def local_update(self, stack):
        self.train(stack, loss_inputs={"a": value})

    message = f"TypeError: loss_inputs['a'] must be clients first, ({len(clients)}, ...), not {got}"
    assert_refused(clients, message, line_of(local_update, "self.train"), local_update=local_update)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [({"a": torch.ones(7)}, "'a' clients first, ({n}, ...), not shape (7,)"), (None, "a dictionary by name, not NoneType")],
)
@pytest.mark.parametrize("clients", CLIENTS)
def test_what_each_step_gives_is_clients_first(clients, value, wanted):
    def give_value(self, now):
        return value

    def local_update(self, stack):
        self.train(stack, before_step=self.given)

    function = "test_what_each_step_gives_is_clients_first.<locals>.give_value"
    message = f"ReturnError: {function} must return {wanted.format(n=len(clients))}"
    assert_refused(clients, message, line_of(give_value), local_update=local_update, given=give_value)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(
    ("models", "wanted"),
    [
        (
            lambda stack: {n: v for n, v in stack.params.items() if n != "classifier.bias"},
            "whole models, classifier.bias of shape ({n}, 10) in 'model', not nothing",
        ),
        (
            lambda stack: stack.params | {"classifier.bias": torch.zeros(10)},
            "whole models, classifier.bias of shape ({n}, 10) in 'model', not shape (10,)",
        ),
        (lambda stack: stack.params | {"head": torch.zeros(10)}, "models as they are, without head in 'model'"),
        (lambda stack: None, "models, tensors by name, not NoneType as 'model'"),
    ],
)
def test_models_to_be_evaluated_by_are_whole(clients, models, wanted):
    """The initial model would replace a missing tensor."""

    def eval_models(self, stack):
        return {"model": models(stack)}

    function = "test_models_to_be_evaluated_by_are_whole.<locals>.eval_models"
    message = f"ReturnError: {function} must return {wanted.format(n=len(clients))}"
    assert_refused(clients, message, line_of(eval_models), "evaluate_clients", eval_models=eval_models)


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_memory_is_of_what_a_checkpoint_can_hold(clients):
    def init_client_state(self, received):
        return {"mine": torch.zeros(2, dtype=torch.complex64)}

    function = "test_a_memory_is_of_what_a_checkpoint_can_hold.<locals>.init_client_state"
    message = f"ReturnError: {function} must return what a checkpoint can hold, not complex64 for 'mine'"
    assert_refused(clients, message, line_of(init_client_state), init_client_state=init_client_state)


# ---------------------------------------------------------------------------------------------- models, patterns, partitions


def another_part(model):
    model.head = nn.Linear(2, 2)


def tie_projector(model):
    model.projector = nn.Sequential(model.classifier)


def fixed(model):
    model.classifier.bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_part, "without parameters beside encoder, projector, classifier, got head.weight"),
        (tie_projector, "that has each parameter once, got classifier.weight, which it has by another name too"),
        (fixed, "whose parameters require a gradient, got classifier.bias; what trains is for a method to say (parts=)"),
    ],
)
def test_a_model_has_three_parts_that_train(monkeypatch, change, said):
    inner = mlp.build

    def built(*given):
        change(model := inner(*given))
        return model

    monkeypatch.setattr(mlp, "build", built)
    choice = choose("model", config_of("model=mlp")["model"])
    with pytest.raises(UserError) as found:
        build_model(choice, 1, (8, 8), 10, 0)
    assert (
        str(found.value) == f"model=mlp: contrafed.models.mlp.build must return a contrafed.core.split_model.SplitModel {said}"
    )


def pattern_fault(monkeypatch, **functions):
    choice = choose("participation", config_of("participation=full")["participation"])
    (own,) = [
        name
        for name, value in vars(full).items()
        if isinstance(value, type) and issubclass(value, Participation) and value is not Participation
    ]
    monkeypatch.setattr(full, own, type("Mine", (Participation,), functions | {"__module__": full.__name__}))
    with pytest.raises(UserError) as found:
        make_participation(choice, lambda: np.ones((2, 2)) / 2, 2, 0)
    return str(found.value)


def test_a_pattern_says_who_is_there(monkeypatch):
    said = "participation=full: Mine says `everyone = False` and must define `available(self, server_round)`"
    assert pattern_fault(monkeypatch, everyone=False) == said
    assert pattern_fault(monkeypatch, everyone=False, availible=lambda self, server_round: np.zeros(2, bool)) == said


def test_a_pattern_with_an_init_of_its_own_calls_the_other(monkeypatch):
    said = "Mine was not initialised; what is drawn once goes into `prepare`, and an `__init__` of its own calls super's"
    assert pattern_fault(monkeypatch, __init__=lambda self, *given: None) == f"participation=full: {said}"


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([0, 1], [1], "test parts apart from training parts; client 0 has 1 images in both"),
        ([0, 9], [], "training parts without test images; client 0 has 1 of the test split"),
        ([[0]], [], "arrays (n,) of whole numbers; client 0 has int64 (1, 1)"),
        ([0.5], [], "arrays (n,) of whole numbers; client 0 has float64 (1,)"),
        ([10], [], "positions in y, 0..9; client 0 has 10..10"),
        ([], [-1], "positions in y, 0..9; client 0 has -1..-1"),
    ],
)
def test_clients_of_a_partition_that_is_drawn_when_asked_are_looked_at(train, test, said):
    class Drawn(Partition):
        num_clients = 2
        __init__ = object.__init__
        train = lambda self, client: np.array(train)  # noqa: E731
        test = lambda self, client: np.array(test, dtype=int)  # noqa: E731

    choice = choose("partition", config_of("partition=sampled")["partition"])
    with pytest.raises(UserError) as found:
        check_lazy(choice, Drawn(), np.arange(10) == 9)
    assert str(found.value).endswith(f"lazy must return {said}")


@pytest.mark.parametrize(
    ("part", "said"), [(np.ones(4, bool), "whole numbers, got bool"), (np.array([7]), "positions in y, 0..3, got 7..7")]
)
def test_index_arrays_index(part, said):
    """A mask would be read as ones and zeros."""
    with pytest.raises((TypeError, ValueError), match=said):
        Partition([part], [part[:0]], np.zeros(4, dtype=np.int64), 2)


def test_a_partition_that_goes_wrong_is_one_line(monkeypatch):
    monkeypatch.setattr(iid, "split", lambda config, draw: draw.owner[0])
    with pytest.raises(UserError) as found:
        load_federation(resolve(config_of("partition=iid", "num_clients=2")).client)
    assert str(found.value).startswith(
        "partition=iid: contrafed.partitions.partitioners.iid.split: TypeError: 'NoneType' object is not sub"
    )


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "must return training parts and test parts, or None for these, as a pair; got NoneType"),
        (([np.arange(3)], None), "must return a list of 2 index arrays, one a client; got 1 parts"),
        (([np.arange(3), np.array([1.5])], None), "must return arrays (n,) of whole numbers; client 1 has float64 (1,)"),
        (([np.arange(3), np.array([99999])], None), "must return positions in all images, 0..1796; client 1 has 99999..99999"),
        (
            ([np.arange(3), np.array([2])], None),
            "must return no position twice; clients 0 and 1 share 1; define lazy where clients are",
        ),
        (
            ([np.arange(3), np.arange(3, 1797)], None),
            "must return training parts without test images; client 0 has 2 of the test split",
        ),
    ],
)
def test_what_explicit_returns_is_a_partition(monkeypatch, found, said):
    monkeypatch.setattr(iid, "explicit", lambda config, test, num_clients: found, raising=False)
    with pytest.raises(UserError) as error:
        load_federation(resolve(config_of("partition=iid", "num_clients=2")).client)
    assert str(error.value).startswith(f"partition=iid: contrafed.partitions.partitioners.iid.explicit {said}")


def test_an_empty_part_has_no_type():
    parts = [np.array([0, 1]), np.array([])]
    assert Partition(parts, [[], []], np.zeros(4, dtype=np.int64), 2).sizes.tolist() == [2, 0]


def test_a_rule_that_has_half_a_model_scored_later_ends_the_run_and_leaves_what_there_is(monkeypatch, tmp_path):
    def eval_model(self, model):
        return model if self.round.server_round < 1 else {}

    monkeypatch.setattr(FedAvg, "eval_model", eval_model)
    quick = ("strategy=fedavg", "engine=local", "num_clients=2", "num_rounds=2", "participation=full", "model=mlp")
    with pytest.raises(RunStopped, match=r"^round 1: FedAvg.eval_model must return the whole model, tensors by name: "):
        run(config_of(*quick, f"output_dir={tmp_path}/run"))
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()
