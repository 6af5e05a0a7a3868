"""Mistakes in a method's code that would silently train, store or evaluate something else.

Each gives one line that names its function.
"""

import inspect
from dataclasses import make_dataclass, replace
from functools import partial

import pytest
import torch
from helpers import build_received, config_of, resolve_and_try, sized_workspace
from torch.nn.functional import cross_entropy

from contrafed.clients.fedavg import FedAvgClient
from contrafed.config.run_config import _check_local_training, resolve
from contrafed.core.errors import RunStopped, UserError
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.runs.output import print_summary
from contrafed.runs.run import run
from contrafed.training.base import LocalError
from contrafed.training.client_stack import ClientState, UnknownNameError
from contrafed.training.errors import ReturnError
from contrafed.training.losses import cosine

SHORT_TRAINING = {"epochs": 1, "iterations": None, "batch_size": 10}


def client_class(clients, strategy="fedavg", **functions):
    """Return a client of ``clients`` whose method has these ``functions``, and its received tensors."""
    workspace = sized_workspace(strategy, [20, 12, 24], local=SHORT_TRAINING)
    kind = type("Mine", (workspace.client_class,), functions)
    return kind(workspace, clients), [build_received(workspace)] * len(clients)


def line_of(function, text="def "):
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


@pytest.fixture(params=[[0], [0, 1, 2]], ids=["alone", "stack"])
def clients(request):
    """One client alone, and a stack whose clients take different numbers of steps."""
    return request.param


@pytest.fixture
def check_told(expect_error, clients):
    """Expect that clients with these functions report a mistake at a line of this file, and return the client."""

    def check(at, cause=ReturnError, ask="update", **functions):
        client, received = client_class(clients, **functions)
        with expect_error(kind=LocalError) as found:
            getattr(client, ask)(received, 1)
        said = str(found.value)
        assert said.startswith(f"client {', '.join(map(str, clients))}, round 1, ")
        assert said.endswith(f" (tests/test_method_faults.py, line {at})")
        assert isinstance(found.value.__cause__, cause)
        return client

    return check


@pytest.fixture
def refused_method(expect_error):
    """Expect the error of FedAvg's configuration before anything is loaded."""

    def check(key="strategy", try_method=resolve_and_try):
        with expect_error(key):
            try_method(config_of("strategy=fedavg"))

    return check


def per_example(self, params, batch, loss_inputs):
    return {"loss": cross_entropy(self.forward(params, batch).logits, batch.y, reduction="none")}


def extra_per_example(self, params, batch, loss_inputs):
    return FedAvgClient.loss(self, params, batch, loss_inputs) | {"mine": batch.mask}


def extra_number(self, params, batch, loss_inputs):
    return FedAvgClient.loss(self, params, batch, loss_inputs) | {"mine": 3}


def detach_loss(self, params, batch, loss_inputs):
    return {"loss": FedAvgClient.loss(self, params, batch, loss_inputs)["loss"].detach()}


def whole_numbers(self, params, batch, loss_inputs):
    return {"loss": self.forward(params, batch).logits.argmax(1).sum()}


def nothing(self, params, batch, loss_inputs):
    FedAvgClient.loss(self, params, batch, loss_inputs)


LOSSES = [per_example, extra_per_example, extra_number, detach_loss, whole_numbers, nothing]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_none_is_told_which_function_and_why(check_told, loss):
    check_told(line_of(loss), loss=loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_a_loss_that_is_none_are_refused_alike(check_told, loss):
    """Otherwise a detached loss has gradients of zero, and its author never notices."""

    def local_update(self, stack):
        self.train(stack, loss=partial(FedAvgClient.loss, self), before_step=self.compute_gradients)

    def compute_gradients(self, now):
        return self.gradients(partial(loss, self), now.stack.params, now.batch, {})

    check_told(line_of(loss), local_update=local_update, compute_gradients=compute_gradients)


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_has_the_same_names_at_every_step(clients, expect_error, first):
    """Otherwise a mean over the phase would count steps without it."""

    def loss(self, params, batch, loss_inputs):
        found = FedAvgClient.loss(self, params, batch, loss_inputs)
        return found | ({"mine": found["loss"]} if ("late" in loss_inputs) != first else {})

    def local_update(self, stack):
        self.train(stack, before_step=lambda now: {"late": now.batch.mask} if now.number else {})
        return self.make_upload(stack)

    client, received = client_class(clients, loss=loss, local_update=local_update)
    with expect_error(kind=LocalError):
        client.update(received, 1)


@pytest.mark.parametrize("kind", [torch.float16, torch.int64])
def test_what_is_sent_is_in_single_or_double_precision(check_told, kind):
    """The server rejects replies of any other type."""

    def local_update(self, stack):
        return {name: value.to(kind) for name, value in FedAvgClient.local_update(self, stack).items()}

    check_told(line_of(local_update), local_update=local_update)


@pytest.mark.parametrize("value", [torch.tensor(1.0), torch.ones(7), 1.0])
def test_what_a_loss_takes_as_constant_is_clients_first(check_told, value):
    """With another shape a single client would take the first number, and each of seven in a stack another."""

    def local_update(self, stack):
        self.train(stack, loss_inputs={"a": value})

    check_told(line_of(local_update, "self.train"), TypeError, local_update=local_update)


@pytest.mark.parametrize("value", [{"a": torch.ones(7)}, None])
def test_what_each_step_gives_is_clients_first(check_told, value):
    def give_value(self, now):
        return value

    def local_update(self, stack):
        self.train(stack, before_step=self.given)

    check_told(line_of(give_value), local_update=local_update, given=give_value)


@pytest.mark.parametrize("parts", [("encoder", "own"), ("encoders",), "encoder"])
def test_parts_to_train_that_there_are_none_of_are_refused(check_told, parts):
    """Otherwise nothing would be trained, without a message."""

    def local_update(self, stack):
        self.train(stack, parts=parts)

    check_told(line_of(local_update, "self.train"), TypeError, local_update=local_update)


@pytest.mark.parametrize(
    "params",
    [
        lambda stack: stack.global_model,  # other clients receive the same tensors
        lambda stack: {f"own/{n}": v.clone() for n, v in stack.params.items()},  # trained by a name of its own
    ],
)
def test_what_is_trained_is_a_model_of_the_clients_own_by_its_names(check_told, params):
    def local_update(self, stack):
        self.train(stack, params=params(stack), purpose="teacher")
        return self.make_upload(stack)

    check_told(line_of(local_update, "self.train"), TypeError, local_update=local_update)


@pytest.mark.parametrize("given", ["teacher", "first"])
def test_a_fixed_encoders_outputs_are_no_input_of_another_model(check_told, given):
    """Otherwise another model's head would be applied to them, without a message, once images repeat."""

    def local_update(self, stack):
        twice = replace(self.config.local, epochs=2)
        others = add_prefix("teacher", {name: value.clone() for name, value in stack.params.items()})
        self.train(stack, local_training=twice, parts=("classifier",), loss=self.distil, loss_inputs=others)

    def distil(self, params, batch, loss_inputs):
        first = {n: v + 1 if n == "encoder.stages.0.1.weight" else v for n, v in params.items()}
        teacher = {"first": first, "teacher": select_prefix(loss_inputs, "teacher")}[given]
        own = self.forward(params, batch)
        return {"loss": (own.logits - self.forward(teacher, batch).logits).square().mean()}

    check_told(line_of(distil, "self.forward(teacher"), TypeError, local_update=local_update, distil=distil)


@pytest.mark.parametrize("name", ["personal/mine", "optimizer/mine"])
def test_names_of_the_frameworks_state_are_refused(check_told, name):
    def init_client_state(self, received):
        return {name: torch.zeros(2)}

    def local_update(self, stack):
        stack.state[name] = torch.zeros(len(stack), 2)

    check_told(line_of(init_client_state), init_client_state=init_client_state)
    check_told(line_of(local_update, "stack.state"), TypeError, local_update=local_update)


def remembering(value):
    """Return a method that stores ``value(stack)`` in a state that starts as two zeros."""

    def local_update(self, stack):
        stack.state["mine"] = value(stack)
        self.train(stack)
        return self.make_upload(stack)

    return {"init_client_state": lambda self, received: {"mine": torch.zeros(2)}, "local_update": local_update}


@pytest.mark.parametrize(
    "value",
    [
        lambda stack: torch.ones(2),  # one client's, without the client axis
        lambda stack: torch.ones(len(stack), 2, 1),
        lambda stack: torch.ones(len(stack), 2 + stack.server_round),  # another one every round
        lambda stack: torch.tensor(1.0),
        lambda stack: [1.0, 1.0],
    ],
)
def test_what_is_remembered_keeps_its_shape(check_told, clients, value):
    method = remembering(value)
    assert check_told(line_of(method["local_update"]), **method).client_states == [{}] * len(clients)


def test_a_memory_of_the_right_shape_is_kept(clients):
    client, received = client_class(clients, **remembering(lambda stack: torch.ones(len(stack), 2)))
    assert [update.client_state["mine"].tolist() for update in client.update(received, 1)] == [[1.0, 1.0]] * len(clients)


def test_a_value_that_clients_begin_to_remember_later_has_the_clients_first_too(expect_error):
    """A checkpoint of a method whose author has changed it since."""
    client, received = client_class([0, 1], **remembering(lambda stack: torch.ones(5)))
    client.client_states = [{"other": torch.zeros(3)}] * 2
    with expect_error(kind=LocalError):
        client.update(received, 2)


@pytest.mark.parametrize("state", [{"mine": 3.0}, torch.zeros(2), {"mine": torch.zeros(2, dtype=torch.complex64)}])
def test_a_memory_begins_with_tensors_that_a_checkpoint_can_hold(check_told, state):
    def init_client_state(self, received):
        return state

    check_told(line_of(init_client_state), init_client_state=init_client_state)


@pytest.mark.parametrize("begun", [{"means": torch.zeros(2), "counts": torch.zeros(2)}, {}])
def test_a_name_that_clients_do_not_remember_is_told_with_those_that_they_do(check_told, begun):
    def local_update(self, stack):
        return stack.state["mean"]

    at = line_of(local_update, "stack.state")
    check_told(at, UnknownNameError, local_update=local_update, init_client_state=lambda self, received: begun)


def test_a_memory_can_be_asked_whether_it_has_a_name():
    memory = ClientState(["there"], lambda name: torch.zeros(1))
    assert ("there" in memory, "elsewhere" in memory, memory.get("elsewhere")) == (True, False, None)
    with pytest.raises(KeyError):
        memory["elsewhere"]


@pytest.mark.parametrize("shared", [("encoder", "head"), ("encoder", "clasifier"), "encoder", ["encoder"]])
def test_parts_that_no_model_has_are_refused_before_a_run(monkeypatch, refused_method, shared):
    with monkeypatch.context() as patch:
        patch.setattr(FedAvgClient, "shared", shared)
        refused_method(try_method=resolve)
    monkeypatch.setattr(FedAvgClient, "shared_parts", classmethod(lambda cls, config: shared))
    refused_method(try_method=resolve)


def test_shared_parts_that_is_no_class_method_is_refused_in_one_line(monkeypatch, expect_error):
    monkeypatch.setattr(FedAvgClient, "shared_parts", lambda cls, config: ("encoder",))
    with expect_error("strategy"):
        resolve(config_of("strategy=fedavg"))


@pytest.mark.parametrize(
    "messages",
    [
        lambda down, up: (down, up | {"x": [10]}),
        lambda down, up: (down, up | {"x": 10}),
        lambda down, up: (down, up | {"x": (1.5,)}),
        lambda down, up: down | up,
        lambda down, up: ({}, up),
    ],
)
def test_what_a_client_declares_are_two_tables_of_shapes(monkeypatch, refused_method, messages):
    inner = FedAvgClient.message_spec
    monkeypatch.setattr(FedAvgClient, "message_spec", classmethod(lambda cls, model, config: messages(*inner(model, config))))
    refused_method()


def test_a_client_has_a_recipe_of_local_training(expect_error):
    choice = resolve(config_of("strategy=fedavg")).client.strategy
    bare = make_dataclass("Config", ["rho"], frozen=True)(0.5)
    with expect_error("strategy"):
        _check_local_training(replace(choice, config=bare), num_rounds=1)


@pytest.mark.parametrize("steps", [lambda self, examples: None, lambda self, examples: 1.5, lambda self, examples: self.n])
def test_how_long_a_client_works_is_a_number_of_steps(monkeypatch, expect_error, tmp_path, steps):
    monkeypatch.setattr(FedAvgClient, "num_local_steps", steps)
    quick = ["strategy=fedavg", "engine=local", "num_clients=2", "num_rounds=1", "participation=full", "model=mlp"]
    with expect_error("FedAvgClient.num_local_steps", (RunStopped, UserError)):
        run(config_of(*quick, f"output_dir={tmp_path}/run"))


@pytest.mark.parametrize(
    "models",
    [
        lambda stack: {n: v for n, v in stack.params.items() if n != "classifier.bias"},
        lambda stack: stack.params | {"classifier.bias": torch.zeros(10)},
        lambda stack: stack.params | {"head": torch.zeros(10)},
        lambda stack: None,
        lambda stack: stack.received.update(means=torch.zeros(10, 4)) or stack.params,  # without the client axis
    ],
)
def test_models_to_be_evaluated_by_are_whole(check_told, models):
    """The initial model would replace a missing tensor."""

    def eval_models(self, stack):
        return {"model": models(stack)}

    check_told(line_of(eval_models), ask="evaluate_clients", eval_models=eval_models)


@pytest.mark.parametrize(
    "found",
    [
        lambda features: features.z,
        lambda features: features.logits.amax(1),  # the likeliest class alone
        lambda features: (features.logits, features.z),
    ],
)
def test_scores_are_one_a_class(check_told, found):
    """With other shapes the largest score is not a label, and a few clients' wrong accuracy would replace all."""

    def scores(self, features, received):
        return found(features)

    check_told(line_of(scores), ask="evaluate_clients", scores=scores)


def test_the_accuracy_of_clients_models_is_that_of_the_clients_which_answered(capsys):
    """Some may have failed, and a summary does not have their number."""
    own = {"personal_accuracy_mean": 0.5, "personal_accuracy_std": 0.125, "personal_accuracy_best": 0.75}
    rest = {"rounds": 3, "seconds": 6.0, "seconds_per_round": 2.0, "bytes_up": 0, "bytes_down": 0, "failures": 3}
    print_summary({**own, **rest, "replies_rejected": 0}, "some/folder")
    said = "personal accuracy: 50.00% of the clients' test examples (+- 12.50% over clients), best 75.00%\n"
    assert capsys.readouterr().out.startswith(said)


def test_a_mistake_that_a_tool_meets_is_placed_where_the_method_calls_it(clients):
    """The line is not in the helper's file, which the method's author did not write."""

    def loss(self, params, batch, loss_inputs):
        return {"loss": cosine(self.forward(params, batch).z, batch.mask.expand(7, 7, -1)).mean()}

    def local_update(self, stack):
        self.train(stack, repeat="twice")

    for functions, text in (({"loss": loss}, "cosine"), ({"local_update": local_update}, "self.train")):
        client, received = client_class(clients, **functions)
        with pytest.raises(LocalError) as found:
            client.update(received, 1)
        (function,) = functions.values()
        assert str(found.value).endswith(f" (tests/test_method_faults.py, line {line_of(function, text)})")


def test_a_mistake_in_no_methods_own_code_is_placed_in_the_tool(monkeypatch):
    client, received = client_class([0])
    monkeypatch.setattr(client, "forward", None)
    with pytest.raises(LocalError, match=r"TypeError: 'NoneType' object is not callable \(training/base\.py, line \d+\)"):
        client.update(received, 1)
