"""Mistakes in a user's strategy: each gives one line with the strategy's name, before its work is lost or used."""

import json
import re
import sys
from collections import defaultdict, namedtuple

import numpy as np
import pytest
import torch
from helpers import config_of, digits_run, resolve_and_try, same
from omegaconf import OmegaConf
from test_external_package import CLIENT, METHOD, RULE, write

from contrafed.config.compose import compose_job
from contrafed.config.run_config import resolve
from contrafed.core.errors import RunStopped, UserError
from contrafed.data.participation import Participation, Selection
from contrafed.runs.run import run
from contrafed.server.replies import AbsentError, Replies, Reply
from contrafed.strategies.fedavg import FedAvg

NAME = "classifier.bias"


def rule(**functions):
    """Return FedAvg with other functions, as a class with the name Mine."""
    return type("Mine", (FedAvg,), functions)


def get_stop(made):
    """Return the single line and the status with which a round of two clients ends under a strategy."""
    with pytest.raises(RunStopped) as found:
        digits_run("fedavg", 1, clients=2, rule=made)
    assert "\n" not in str(found.value)
    return str(found.value), found.value.status


def unsent(**functions):
    """Return the error about tensors that clients cannot use: before the first round's training, and in the next round."""
    with pytest.raises(UserError) as first:
        digits_run("fedavg", 1, clients=2, rule=rule(**functions))
    ((name, function),) = functions.items()

    def later(self, *args):
        return (function if self.round.server_round > 1 else getattr(FedAvg, name))(self, *args)

    with pytest.raises(RunStopped) as second:
        digits_run("fedavg", 2, clients=2, rule=rule(**{name: later}))
    assert str(second.value) == f"round 2: {first.value}"
    assert "\n" not in str(first.value)
    return str(first.value)


# ------------------------------------------------------------------------------------------------ a strategy's model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda mean: None, "got NoneType"),
        (lambda mean: list(mean.values()), "got list"),
        (lambda mean: {f"model/{n}": v for n, v in mean.items()}, r"unknown 'model/(.*)', did you mean '\1'\?"),
        (lambda mean: mean | {0: mean[NAME]}, "unknown '0', did you mean '.*'"),
        (lambda mean: mean | {NAME: mean[NAME].numpy()}, rf"{NAME} is a tensor of shape \(10,\), got ndarray \(10,\)"),
        (lambda mean: mean | {NAME: mean[NAME].sum()}, rf"{NAME} is a tensor of shape \(10,\), got Tensor \(\)"),
        (lambda mean: mean | {NAME: 0.5}, rf"{NAME} is a tensor of shape \(10,\), got float"),
    ],
)
def test_what_is_no_model_is_refused_before_it_is_taken(change, said):
    made = rule(aggregate=lambda self, model, replies: change(self.mean(model, replies)))
    line, status = get_stop(made)
    assert re.match(rf"round 1: Mine.aggregate must return tensors of the model by name: {said}", line)
    assert status == "failed"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_model_that_is_not_finite_ends_the_run_as_the_rules_fault(value):
    """Also one that is finite in the strategy's float64, but not in the model's float32."""

    def aggregate(self, model, replies):
        mean = self.mean(model, replies)
        if self.round.server_round == 2:
            mean[NAME][3] = value
        return mean

    with pytest.raises(RunStopped) as found:
        digits_run("fedavg", 2, clients=2, rule=rule(aggregate=aggregate), dtype=torch.float32)
    assert str(found.value) == f"round 2: Mine.aggregate made a model that is not finite ({NAME})"
    assert found.value.status == "diverged"


def test_what_would_last_beside_the_state_is_refused():
    """A resumed run would start it anew, with other numbers."""

    def aggregate(self, model, replies):
        self.ema = self.mean(model, replies)
        return self.ema

    wanted = "what lasts goes into self.state, what does not is begun in setup()"
    assert get_stop(rule(aggregate=aggregate))[0] == f"round 1: Mine: no checkpoint holds self.ema: {wanted}"
    digits_run("fedavg", 1, clients=2, rule=rule(aggregate=aggregate, setup=lambda self: setattr(self, "ema", None)))


def test_what_a_rule_leaves_out_stays_and_large_numbers_are_finite():
    made = rule(aggregate=lambda self, model, replies: {NAME: torch.full((10,), 1e30)})
    models, _ = digits_run("fedavg", 1, clients=2, rule=made, dtype=torch.float32)
    assert (models[1][NAME] == 1e30).all()
    assert models[1].keys() == models[0].keys()
    assert all(torch.equal(models[1][name], value) for name, value in models[0].items() if name != NAME)


def test_a_run_that_its_rule_ends_is_one_line_and_keeps_its_checkpoints(tmp_path, monkeypatch):
    real = FedAvg.aggregate

    def aggregate(self, model, replies):
        return {n: v * torch.nan if self.round.server_round == 2 else v for n, v in real(self, model, replies).items()}

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    tiny = ("engine=local", "num_clients=2", "num_rounds=3", "model=mlp", "model.hidden=[8]", "strategy.local.iterations=1")
    wanted = (
        "strategy=fedavg",
        *tiny,
        "participation=full",
        "checkpoint_every=1",
        "resume=latest",
        f"output_dir={tmp_path}/run",
    )
    with pytest.raises(RunStopped, match="^round 2: FedAvg.aggregate made a model that is not finite"):
        run(config_of(*wanted))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("diverged", 1)
    monkeypatch.undo()
    assert run(config_of(*wanted))["status"] == "finished"


# ------------------------------------------------------------------------------------------------ what clients did not send


@pytest.mark.parametrize("sums", ["mean", "weighted_sum", "weighted_terms"])
def test_a_sum_of_what_no_client_sends_names_what_they_send(sums):
    made = rule(aggregate=lambda self, model, replies: getattr(replies, sums)("modle", np.ones(len(replies))))
    said = "unknown group of tensors 'modle', did you mean 'model'? choices: delta, model"
    assert get_stop(made)[0] == f"round 1: Mine.aggregate: {said}"


def test_clients_may_send_nothing_or_none_of_the_model():
    one = np.ones(1)
    assert Replies([Reply(0, {}, 1, {})]).mean("proto", one) == {}
    prototypes = Replies([Reply(0, {"proto/mean": torch.ones(2)}, 1, {})])
    assert prototypes.mean("model", one) == {}  # a method whose encoder has no parameters
    assert prototypes.mean("proto", one).keys() == {"mean"}
    with pytest.raises(AbsentError, match="unknown group of tensors 'prot', did you mean 'proto'[?] choices: proto$"):
        prototypes.mean("prot", one)


# ------------------------------------------------------------------------------------------------------- metrics and state


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.tensor([1.0, 2.0]), "Tensor (2,)"),
        (torch.tensor(1.0), "Tensor ()"),
        (np.float32(1), "float32 ()"),
        ([1.0], "list"),
        (True, "bool"),
        (np.inf, "inf"),
    ],
)
def test_a_metric_that_is_no_number_is_named(value, got):
    def aggregate(self, model, replies):
        self.round.metrics["x"] = value
        return self.mean(model, replies)

    wanted = "must be a finite number, such as float(x), or NaN, got "
    assert get_stop(rule(aggregate=aggregate))[0] == f"round 1: Mine: self.round.metrics['x'] {wanted}{got}"


def test_a_metric_may_be_nan():
    def aggregate(self, model, replies):
        self.round.metrics |= {"x": np.nan, "y": np.float64(2), "z": 3}
        return self.mean(model, replies)

    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(aggregate=aggregate))
    assert (strategy.round.metrics["y"], strategy.round.metrics["z"]) == (2, 3)


@pytest.mark.parametrize(
    ("pair", "got"),
    [
        (([0, 1], [0.5]), "shapes (2,), (1,)"),
        (([0, 1], np.ones((2, 1))), "shapes (2,), (2, 1)"),
        ((0, 0.5), "shapes (), ()"),
        (np.ones(2), "ndarray (2,)"),
        ({0: 0.5}, "dict"),
    ],
)
def test_a_metric_of_clients_has_a_value_for_each(pair, got):
    def aggregate(self, model, replies):
        self.round.client_metrics["x"] = pair
        return self.mean(model, replies)

    wanted = "must be (clients, values), a value for each client, got "
    assert get_stop(rule(aggregate=aggregate))[0] == f"round 1: Mine: self.round.client_metrics['x'] {wanted}{got}"


Pair = namedtuple("Pair", "first second")
CHECKPOINT_CONTENT = (
    "but a checkpoint holds tensors, arrays, numbers and text, in lists, tuples and dictionaries by text or whole numbers"
)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"f": {1, 2}}, "self.state['f'] is a set"),
        ({"f": [1, {"g": object()}]}, "self.state['f'][1]['g'] is a object"),
        ({"f": {(0, 1): torch.ones(1)}}, "self.state['f'][(0, 1)] has a tuple for its name"),
        ({"f": np.array([None])}, "self.state['f'] is an array of object"),
        ({"f": np.ones(1, "uint16")}, "self.state['f'] is an array of uint16"),
        ({"f": np.ones(1, ">f4")}, "self.state['f'] is an array of >f4"),
        ({"f": [np.complex64(1j)]}, "self.state['f'][0] is a number of complex64"),
        ({"f": torch.ones(1, dtype=torch.complex64)}, "self.state['f'] is a tensor of complex64"),
        ({"f": torch.eye(2).to_sparse()}, "self.state['f'] is a tensor of sparse_coo float32"),
        ({"f": Pair(1, 2)}, "self.state['f'] is a Pair"),
        ({"f": defaultdict(int)}, "self.state['f'] is a defaultdict"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_before_the_run_and_in_the_round_that_brings_it(state, said):
    with pytest.raises(UserError) as found:
        digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: self.state.update(state)))
    assert str(found.value) == f"Mine: {said}, {CHECKPOINT_CONTENT}"

    def aggregate(self, model, replies):
        self.state |= state
        return self.mean(model, replies)

    assert get_stop(rule(aggregate=aggregate))[0] == f"round 1: Mine: {said}, {CHECKPOINT_CONTENT}"


def test_a_state_may_hold_what_a_checkpoint_does():
    held = {"a": {7: {"w": torch.ones(1)}}, "b": [np.zeros(2), (1, np.int64(2))], "c": None, "d": "text", "e": True, "f": 0.5}
    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(setup=lambda self: self.state.update(held)))
    assert strategy.state.keys() == held.keys()


# ---------------------------------------------------------------------------------------------------- who is asked, and what


@pytest.mark.parametrize(
    ("clients", "got"),
    [
        ([0, 1, 99], "99"),
        ([-1, 0], "-1"),
        ([1, 0, 1], "1"),
        (np.array([0.0, 1.0]), r"float64 (2,)"),
        (np.array([True, False]), r"bool (2,)"),
        ([[0, 1]], "int64 (1, 2)"),
        (None, "object ()"),
    ],
)
def test_clients_that_there_are_not_cannot_be_selected(clients, got):
    wanted = "round 1: Mine.select must return partition ids, whole numbers of 0..1, each at most once"
    assert get_stop(rule(select=lambda self, server_round: clients))[0] == f"{wanted}, got {got}"


@pytest.mark.parametrize("clients", [[], [1, 0], np.array([1], dtype=np.uint8)])
def test_a_selection_is_sorted_and_may_be_a_list_or_empty(clients):
    _, strategy = digits_run("fedavg", 1, clients=2, rule=rule(select=lambda self, server_round: clients))
    assert strategy.round.participants.tolist() == sorted(clients)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({f"model/{NAME}": torch.zeros(3)}, f"the client expects model/{NAME} of shape (10,), but Mine sends (3,)"),
        ({f"model/{NAME}": np.zeros(10)}, f"Mine must send tensors, but model/{NAME} is a ndarray (10,)"),
        ([torch.zeros(10)], "Mine must send tensors by name, in a dictionary, not list"),
    ],
)
def test_what_one_client_alone_receives_is_looked_at(own, said):
    line = unsent(per_client_broadcast=lambda self, model, client, evaluating: own if client else None)
    assert line.removeprefix("strategy.server: ") == said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda sent: None, "Mine must send tensors by name, in a dictionary, not NoneType"),
        (lambda sent: {n: v.sum() for n, v in sent.items()}, r"client expects model/.* of shape .*, but Mine sends \(\)"),
        (lambda sent: {n: v for n, v in sent.items() if NAME not in n}, f"expects model/{NAME}, which Mine does not send"),
        (
            lambda sent: {n.removeprefix("model/"): v for n, v in sent.items()},
            rf'which Mine does not send: its {NAME} goes out as add_prefix\("model", ...\), of contrafed.core.tensors',
        ),
        (lambda sent: sent | {"extra/x": 1}, "Mine must send tensors, but extra/x is a int"),
        (lambda sent: sent | {"modl/x": torch.ones(1)}, "Mine sends modl/x, which the client does not expect, did you .*"),
        (lambda sent: sent | {f"model/{NAME}": torch.arange(10)}, f"as floating-point numbers, but model/{NAME} is int64"),
    ],
)
def test_what_all_clients_receive_is_looked_at(change, said):
    sends = lambda self, model: change(FedAvg.broadcast(self, model))  # noqa: E731
    assert re.search(f"{said}$", unsent(broadcast=sends))


def test_what_the_broadcast_lacks_may_come_with_what_each_client_alone_receives():
    whole = lambda self, model, client, evaluating: FedAvg.broadcast(self, model)  # noqa: E731
    models, _ = digits_run("fedavg", 1, clients=2, rule=rule(broadcast=lambda self, model: {}, per_client_broadcast=whole))
    assert same(models[1], digits_run("fedavg", 1, clients=2)[0][1])


# -------------------------------------------------------------------------------------------------------- before a run starts


@pytest.fixture
def get_refusal(tmp_path, monkeypatch):
    """Return the error about a user's method with one mistake in its client or its strategy."""
    write(tmp_path / "my_package" / "__init__.py", "")
    write(tmp_path / "yamls" / "strategy" / "mine.yaml", METHOD)
    monkeypatch.syspath_prepend(str(tmp_path))

    def check_method(half, more):
        for name, text in (("method", CLIENT), ("rule", RULE)):
            write(tmp_path / "my_package" / f"my_{name}.py", text + (more if name == half else ""))
        asked = ["strategy=mine", "num_clients=4", "model=mlp", "model.hidden=[8]"]
        with pytest.raises(UserError) as found:
            resolve_and_try(OmegaConf.to_container(compose_job(asked, tmp_path / "yamls"), resolve=True))
        assert "\n" not in str(found.value)
        return str(found.value)

    yield check_method
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


RULES = "strategy.server=my_package.my_rule: MyRule"


@pytest.mark.parametrize(
    ("half", "more", "said"),
    [
        ("method", "    upload = 'weights'", "strategy=mine: MyClient: unknown upload 'weights'; choices: delta, model"),
        (
            "method",
            "    @classmethod\n    def message_spec(cls, model, config):\n        return config.nothing",
            r"strategy=mine: MyClient\.message_spec: AttributeError: .*nothing.* \(my_package/my_method\.py, line \d+\)",
        ),
        (
            "rule",
            "    def setup(self):\n        raise ValueError('a\\nslip')",
            rf"{RULES}\.setup: ValueError: a slip \(my_.*\)",
        ),
        ("rule", "    def setup(self):\n        self.state['f'] = {1}", r"MyRule: self\.state\['f'\] is a set, .*"),
        ("rule", "    def broadcast(self, model):\n        return model['x']", rf"{RULES}\.broadcast: KeyError: 'x' \(my_.*\)"),
        ("rule", "    def broadcast(self, model):\n        pass", "MyRule must send tensors by name, .*, not NoneType"),
        (
            "rule",
            "    def broadcast(self, model):\n        return {n: v.sum() for n, v in super().broadcast(model).items()}",
            r"strategy\.server: the client expects model/\S+ of shape \(.*\), but MyRule sends \(\)",
        ),
        (
            "rule",
            "    def per_client_broadcast(self, model, client, evaluating):\n        return self.nothing",
            rf"{RULES}\.per_client_broadcast: AttributeError: .*nothing.* \(my_package/my_rule\.py, line \d+\)",
        ),
    ],
)
def test_what_can_be_told_before_a_run_is(get_refusal, half, more, said):
    assert re.fullmatch(said, get_refusal(half, more))


# ---------------------------------------------------------------------------------------- participation rates


@pytest.mark.parametrize(
    ("presence", "got"),
    [
        (0.5, "float ()"),
        (np.ones(3), "float64 (3,)"),
        ([1.0] * 4, "list (4,)"),
        (np.ones(4, dtype=bool), "bool (4,)"),
        (np.full(4, 50.0), "50.0 to 50.0"),
        (np.array([0.5, 0.5, np.nan, 1]), "nan to nan"),
    ],
)
def test_a_presence_that_is_no_shares_is_refused(presence, got):
    pattern = type("Mine", (Participation,), {"presence": lambda self: presence})(Selection(None, 0.0), None, 4, 0)
    with pytest.raises(UserError) as found:
        pattern.probability()
    assert str(found.value) == f"Mine.presence must return (4,) shares of rounds, 0 to 1, or None, got {got}"


def test_a_presence_is_looked_at_before_a_run(monkeypatch):
    monkeypatch.setattr("contrafed.partitions.participation.bernoulli.Bernoulli.presence", lambda self: 0.5)
    with pytest.raises(UserError, match=r"^Bernoulli\.presence must return \(4,\) shares"):
        resolve(config_of("strategy=fedavg", "strategy.weights=known_probability", "num_clients=4", "participation=bernoulli"))
