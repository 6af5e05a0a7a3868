"""Mistakes in a method's code that would silently train, store or evaluate something else.

Each gives one line that names its function.
"""

import inspect
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import build_received, config_of, sized_workspace
from torch.nn.functional import cross_entropy

from contrafed.clients.fedavg import FedAvgClient
from contrafed.config.run_config import resolve
from contrafed.core.errors import UserError
from contrafed.runs.output import print_summary
from contrafed.training.base import LocalError
from contrafed.training.client_stack import ClientState
from contrafed.training.losses import cosine

CLIENTS = [[0], [0, 1, 2]]  # alone, and as a stack whose clients take different numbers of steps
SHORT_TRAINING = {"epochs": 1, "iterations": None, "batch_size": 10}


def client_class(clients, strategy="fedavg", **functions):
    """Return a client of ``clients`` whose method has these ``functions``, and its received tensors."""
    workspace = sized_workspace(strategy, [20, 12, 24], local=SHORT_TRAINING)
    kind = type("Mine", (workspace.client_class,), functions)
    return kind(workspace, clients), [build_received(workspace)] * len(clients)


def assert_refused(clients, message, at, ask="update", **functions):
    """Assert that a client of ``clients`` with these ``functions`` reports ``message``, and line ``at`` of the calling file."""
    file = Path(sys._getframe(1).f_code.co_filename).name
    client, received = client_class(clients, **functions)
    with pytest.raises(LocalError) as found:
        getattr(client, ask)(received, 1)
    said = str(found.value)
    assert said.startswith(f"client {', '.join(map(str, clients))}, round 1, ")
    assert said.endswith(f": {message} (tests/{file}, line {at})")
    return client


def line_of(function, text="def "):
    lines, first = inspect.getsourcelines(function)
    return first + next(k for k, line in enumerate(lines) if text in line)


# ------------------------------------------------------------------------------------------------------------------- losses


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


LOSSES = [
    (per_example, "a scalar tensor for each name, not shape (10,) for 'loss'"),
    (extra_per_example, "a scalar tensor for each name, not shape (10,) for 'mine'"),
    (extra_number, "a scalar tensor for each name, not int for 'mine'"),
    (detach_loss, "a 'loss' with a gradient: this one depends on nothing that is trained"),
    (whole_numbers, "a floating-point number as 'loss', not torch.int64"),
    (nothing, "a dictionary with 'loss'"),
]


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(("loss", "wanted"), LOSSES)
def test_a_loss_that_is_none_is_told_which_function_and_why(clients, loss, wanted):
    assert_refused(clients, f"ReturnError: {loss.__name__} must return {wanted}", line_of(loss), loss=loss)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("kind", [torch.float16, torch.int64])
def test_what_is_sent_is_in_single_or_double_precision(clients, kind):
    """The server rejects replies of any other type."""

    def local_update(self, stack):
        return {name: value.to(kind) for name, value in FedAvgClient.local_update(self, stack).items()}

    function = "test_what_is_sent_is_in_single_or_double_precision.<locals>.local_update"
    message = f"ReturnError: {function} must return model/encoder.stages.0.1.weight in float32 or float64, not {kind}"
    assert_refused(clients, message, line_of(local_update), local_update=local_update)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(("loss", "wanted"), LOSSES)
def test_gradients_of_a_loss_that_is_none_are_refused_alike(clients, loss, wanted):
    """Otherwise a detached loss has gradients of zero, and its author never notices."""

    def local_update(self, stack):
        self.train(stack, loss=partial(FedAvgClient.loss, self), before_step=self.compute_gradients)

    def compute_gradients(self, now):
        return self.gradients(partial(loss, self), now.stack.params, now.batch, {})

    message = f"ReturnError: {loss.__name__} must return {wanted}"
    assert_refused(clients, message, line_of(loss), local_update=local_update, compute_gradients=compute_gradients)


# ------------------------------------------------------------------------------------------------------------- client state


def remembering(value):
    """Return a method that stores ``value(stack)`` in a state that starts as two zeros."""

    def local_update(self, stack):
        stack.state["mine"] = value(stack)
        self.train(stack)
        return self.make_upload(stack)

    return {"init_client_state": lambda self, received: {"mine": torch.zeros(2)}, "local_update": local_update}


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (lambda stack: torch.ones(2), "shape (2,)"),  # one client's, without the client axis
        (lambda stack: torch.ones(len(stack), 2, 1), "shape ({n}, 2, 1)"),
        (lambda stack: torch.ones(len(stack), 2 + stack.server_round), "shape ({n}, 3)"),  # another one every round
        (lambda stack: torch.tensor(1.0), "shape ()"),
        (lambda stack: [1.0, 1.0], "list"),
    ],
)
def test_what_is_remembered_keeps_its_shape(clients, value, found):
    method, count = remembering(value), len(clients)
    wanted = f"mine of shape ({count}, 2), clients first, not {found.format(n=count)}"
    local_update = method["local_update"]
    message = f"ReturnError: remembering.<locals>.local_update must remember {wanted}"
    assert assert_refused(clients, message, line_of(local_update), **method).client_states == [{}] * count


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_memory_of_the_right_shape_is_kept(clients):
    client, received = client_class(clients, **remembering(lambda stack: torch.ones(len(stack), 2)))
    assert [update.client_state["mine"].tolist() for update in client.update(received, 1)] == [[1.0, 1.0]] * len(clients)


def test_a_value_that_clients_begin_to_remember_later_has_the_clients_first_too():
    """A checkpoint of a method whose author has changed it since."""
    method = remembering(lambda stack: torch.ones(5))
    client, received = client_class([0, 1], **method)
    client.client_states = [{"other": torch.zeros(3)}] * 2
    with pytest.raises(LocalError, match=r"must remember mine of shape \(2,\), clients first, not shape \(5,\)"):
        client.update(received, 2)


def number(self, received):
    return {"mine": 3.0}


def no_dictionary(self, received):
    return torch.zeros(2)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(
    ("init_client_state", "wanted"),
    [(number, "a tensor for each name, not float for 'mine'"), (no_dictionary, "a dictionary of tensors, not shape (2,)")],
)
def test_a_memory_begins_with_tensors(clients, init_client_state, wanted):
    message = f"ReturnError: {init_client_state.__name__} must return {wanted}"
    assert_refused(clients, message, line_of(init_client_state), init_client_state=init_client_state)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(
    ("begun", "said"),
    [
        ({"means": torch.zeros(2), "counts": torch.zeros(2)}, "unknown name in stack.state 'mean', did you mean 'means'?"),
        ({}, "stack.state has no 'mean': init_client_state returns nothing"),
    ],
)
def test_a_name_that_clients_do_not_remember_is_told_with_those_that_they_do(clients, begun, said):
    def local_update(self, stack):
        return stack.state["mean"]

    message = f"UnknownNameError: {said}{' choices: counts, means' if begun else ''}"
    at = line_of(local_update, "stack.state")
    assert_refused(clients, message, at, local_update=local_update, init_client_state=lambda self, received: begun)


def test_a_memory_can_be_asked_whether_it_has_a_name():
    memory = ClientState(["there"], lambda name: torch.zeros(1))
    assert ("there" in memory, "elsewhere" in memory, memory.get("elsewhere")) == (True, False, None)
    with pytest.raises(KeyError):
        memory["elsewhere"]


# ------------------------------------------------------------------------------------------------------------ parts, scores


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        (("encoder", "head"), ": unknown part of the model 'head'; choices: classifier, encoder, projector"),
        (("encoder", "clasifier"), ": unknown part of the model 'clasifier', did you mean 'classifier'? choices: classifier, "),
        ("encoder", " must be a tuple of parts of the model, such as ('encoder',), got 'encoder'"),
        (["encoder"], " must be a tuple of parts of the model, such as ('encoder',), got ['encoder']"),
    ],
)
def test_parts_that_no_model_has_are_refused_before_a_run(monkeypatch, shared, said):
    with monkeypatch.context() as patch:
        patch.setattr(FedAvgClient, "shared", shared)
        with pytest.raises(UserError) as found:
            resolve(config_of("strategy=fedavg"))
    assert str(found.value).startswith(f"strategy=fedavg: FedAvgClient.shared{said}")
    monkeypatch.setattr(FedAvgClient, "shared_parts", classmethod(lambda cls, config: shared))
    with pytest.raises(UserError) as found:
        resolve(config_of("strategy=fedavg"))
    assert str(found.value).startswith(f"strategy=fedavg: FedAvgClient.shared_parts{said}")


def test_shared_parts_that_is_no_class_method_is_refused_in_one_line(monkeypatch):
    def shared_parts(cls, config):
        return ("encoder",)

    monkeypatch.setattr(FedAvgClient, "shared_parts", shared_parts)
    with pytest.raises(UserError, match="^strategy=fedavg: FedAvgClient.shared_parts: TypeError: .* missing 1 required"):
        resolve(config_of("strategy=fedavg"))


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (("encoder", "own"), ": unknown part of the model 'own'; choices: classifier, encoder, projector"),
        (
            ("encoders",),
            ": unknown part of the model 'encoders', did you mean 'encoder'? choices: classifier, encoder, projector",
        ),
        ("encoder", " must be a tuple of parts of the model, such as ('encoder',), got 'encoder'"),
    ],
)
def test_parts_to_train_that_there_are_none_of_are_refused(clients, parts, said):
    """Otherwise nothing would be trained, without a message."""

    def local_update(self, stack):
        self.train(stack, parts=parts)

    assert_refused(
        clients, f"TypeError: the parts to train{said}", line_of(local_update, "self.train"), local_update=local_update
    )


def representations(self, features, received):
    return features.z


def likeliest(self, features, received):
    return features.logits.amax(1)


def twice(self, features, received):
    return features.logits, features.z


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize(("scores", "found"), [(representations, "shape (3, 5)"), (likeliest, "shape (3,)"), (twice, "tuple")])
def test_scores_are_one_a_class(clients, scores, found):
    """With other shapes the largest score is not a label, and a few clients' wrong accuracy would replace all."""
    message = f"ReturnError: {scores.__name__} must return scores of shape (3, 10), by example and class, not {found}"
    assert_refused(clients, message, line_of(scores), "evaluate_clients", scores=scores)


def test_the_accuracy_of_clients_models_is_that_of_the_clients_which_answered(capsys):
    """Some may have failed, and a summary does not have their number."""
    own = {"personal_accuracy_mean": 0.5, "personal_accuracy_std": 0.125, "personal_accuracy_best": 0.75}
    rest = {"rounds": 3, "seconds": 6.0, "seconds_per_round": 2.0, "bytes_up": 0, "bytes_down": 0, "failures": 3}
    print_summary({**own, **rest, "replies_rejected": 0}, "some/folder")
    said = "personal accuracy: 50.00% of the images that clients scored (+- 12.50% over these clients), best 75.00%\n"
    assert capsys.readouterr().out.startswith(said)


# ------------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("clients", CLIENTS)
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


# ----------------------------------------------------------------------------------------------------------- what trains


@pytest.mark.parametrize("clients", CLIENTS)
def test_what_the_server_sent_is_not_trained(clients):
    """Other clients receive the same tensors."""

    def local_update(self, stack):
        self.train(stack, params=stack.global_model, purpose="teacher")
        return self.make_upload(stack)

    said = "encoder.stages.0.1.weight is what the client received, which other clients receive too; clone it"
    assert_refused(
        clients, f"TypeError: train(params=...): {said}", line_of(local_update, "self.train"), local_update=local_update
    )


@pytest.mark.parametrize("clients", CLIENTS)
def test_a_model_of_its_own_name_is_trained_by_that(clients):
    def local_update(self, stack):
        self.train(stack, params={f"own/{n}": v.clone() for n, v in stack.params.items()}, purpose="own")
        return self.make_upload(stack)

    said = (
        "TypeError: train(params=...) holds 'own/...', which train(parts=('encoder', 'projector', 'classifier')) does not name"
    )
    assert_refused(clients, said, line_of(local_update, "self.train"), local_update=local_update)


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("first", [True, False])
def test_a_loss_has_the_same_names_at_every_step(clients, first):
    """Otherwise a mean over the phase would count steps without it."""

    def loss(self, params, batch, loss_inputs):
        found = FedAvgClient.loss(self, params, batch, loss_inputs)
        return found | ({"mine": found["loss"]} if ("late" in loss_inputs) != first else {})

    def local_update(self, stack):
        self.train(stack, before_step=lambda now: {"late": now.batch.mask} if now.number else {})
        return self.make_upload(stack)

    client, received = client_class(clients, loss=loss, local_update=local_update)
    with pytest.raises(LocalError, match="must return the same names at every step of a phase, not 'mine' at some"):
        client.update(received, 1)
