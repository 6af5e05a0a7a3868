"""Checks of what a method and a network must not change, and of what a network is made of."""

import copy
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from contrafed.check.fault import Fault, Skipped, find_difference, loss_line, own_class, results_of
from contrafed.check.first_difference import first_difference, line_of_attribute
from contrafed.check.lines import first_change, place_of
from contrafed.check.problem import Problem, copy_tensors, run_rounds
from contrafed.core.randomness import read_global_state
from contrafed.core.tensors import Tensors
from contrafed.core.trial import HIDDEN_FIX, find_hidden_layers, list_numbers
from contrafed.training.base import Client

MAX_COSINE = 0.5  # between an update and the gradient of the cross-entropy


def check_copies(problem: Problem) -> Fault | None:
    """Copies of the model and of the client are independent of the original."""
    client = problem.open([0])
    model = problem.workspace.model
    x = problem.images
    try:
        workspace = problem.workspace  # which holds modules of code, and is no part of a copy
        other, twin = copy.deepcopy(model), copy.deepcopy(client, {id(workspace): workspace})
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Fault(f"copy.deepcopy of the model or the client raises {said}", "attributes that can be copied")
    with torch.no_grad():
        before = model(x).logits.clone()
        for value in other.tensors().values():
            value.mul_(0.5).add_(0.25)
        if not torch.equal(model(x).logits, before):
            return Fault(
                "a change of a copy's parameters changes the model", "parameters that each model makes itself", own_class(model)
            )
        with other.holding(model.tensors()):
            if not torch.allclose(other(x).logits, before):
                fix = "a forward pass that reads its parameters as self.NAME, not a tensor that was stored before"
                return Fault("the network does not compute with parameters that are put in its place", fix, own_class(model))
    received = [problem.received[0]]
    one, two = (each.update(received, problem.server_round)[0].tensors for each in (client, twin))
    if name := find_difference(one, two):
        return Fault(f"a copy of the client gives another upload '{name}'", "state only in stack.state", loss_line(problem))
    return None


def check_random_state(problem: Problem) -> Fault | None:
    """The global generators of torch, NumPy and Python are untouched."""

    def work() -> None:
        problem.update([0])
        problem.evaluate([0])

    before, wrong = read_global_state(), None
    for call in (work, lambda: run_rounds(problem)):
        call()
        if read_global_state() != before:
            wrong = call
            break
    if wrong is None:
        return None
    line = first_change(problem.author, read_global_state, wrong)
    fix = "contrafed.core.randomness before the loss, and the numbers as loss_inputs; in data, a generator of a fixed seed"
    return Fault("draws from the global random state, so that one seed gives several results", fix, line)


def state_of(client: Client) -> dict[str, int]:
    """Return the attributes of a client, its class and its module with the sizes of containers, which must not grow.

    The plain numbers of the network's own layers are among them.
    """
    kind = type(client)
    kept = ("losses", "client_states")
    own = {
        f"self.{name}": value
        for name, value in vars(client).items()
        if name not in kept and not isinstance(getattr(kind, name, None), cached_property)
    }
    for each in kind.__mro__:
        if each.__module__.startswith(("contrafed.", "flwr.", "builtins", "abc")):
            continue
        own |= {f"{each.__name__}.{name}": value for name, value in vars(each).items() if not name.startswith("__")}
        module = sys.modules.get(each.__module__)
        own |= {name: value for name, value in vars(module).items() if not name.startswith("__")} if module else {}
    sizes = {name: len(value) if isinstance(value, list | dict | set) else -1 for name, value in own.items()}
    sizes |= {f"the network's {name}": hash(value) for name, value in list_numbers(client.model).items()}
    sizes |= {
        name: hash(value) for name, value in own.items() if isinstance(value, int | float | str) and name != "self.server_round"
    }
    return sizes


def check_attributes(problem: Problem) -> Fault | None:
    """A client, its class, its module and its network gain nothing in a round, because all clients may share it."""
    client = problem.open([0])
    received = [problem.received[0]]
    before = state_of(client)

    def work() -> None:
        client.update(received, problem.server_round)

    work()
    after = state_of(client)
    new = [name for name, value in after.items() if before.get(name) != value and name != "self.diverged"]
    if not new:
        return None
    fresh = problem.open([0])
    line = first_change(problem.author, lambda: state_of(fresh), lambda: fresh.update(received, problem.server_round))
    fix = "init_client_state and stack.state for what lasts, loss_inputs for constants of a round"
    return Fault(f"a round changes {new[0]}, which no checkpoint has and other clients may share", fix, line)


def check_in_place(problem: Problem) -> Fault | None:
    """No layer changes its input, and no method changes what it received or what its loss is given."""
    model = problem.workspace.model
    if found := changing_layer(model, problem.images):
        return Fault(f"{found[0]} changes its input in place, so that features are others' or are lost", found[2], found[1])
    seen = versions_of(problem)
    before = seen()
    problem.update([0])
    problem.evaluate([0])
    if seen() != before:
        line = first_change(problem.author, seen, lambda: problem.update([0])) or first_change(
            problem.author, seen, lambda: problem.evaluate([0])
        )
        fix = "clones, such as value.clone(), since other clients receive the same tensors"
        return Fault("changes in place what the client received, its initial model, or the network's own parameters", fix, line)
    return None


def versions_of(problem: Problem) -> Callable[[], list[int]]:
    """Return a function that counts the in-place changes of received tensors, the initial model and the network."""
    tensors = [*problem.received[0].values(), *problem.workspace.initial.values(), *problem.workspace.model.tensors().values()]
    return lambda: [value._version for value in tensors]


def changing_layer(model: nn.Module, x: Tensor) -> tuple[str, str, str] | None:
    """Return the first layer that changes its input in place, with the line of its forward pass and a fix."""
    found: list[tuple[str, str, str]] = []
    marks: dict[str, list[int]] = {}

    def before(module: nn.Module, given: Any, name: str) -> None:
        marks[name] = [value._version for value in given if isinstance(value, Tensor)]

    def after(module: nn.Module, given: Any, out: Any, name: str) -> None:
        if marks.get(name) != [value._version for value in given if isinstance(value, Tensor)]:
            inplace = getattr(module, "inplace", False)
            line = "" if type(module).__module__.startswith("torch.") else place_of(type(module).forward)
            found.append(
                (f"{name} ({type(module).__name__})", line, "inplace=False" if inplace else "operations without a final _")
            )

    handles = []
    for name, layer in model.named_modules():
        if name:
            handles.append(layer.register_forward_pre_hook(lambda m, g, name=name: before(m, g, name)))
            handles.append(layer.register_forward_hook(lambda m, g, o, name=name: after(m, g, o, name)))
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def check_evaluation(problem: Problem) -> Fault | None:
    """An evaluation changes no client state."""
    client = problem.open([0])
    before = copy_tensors(client.client_states[0])
    client.evaluate_clients([problem.received[0]], problem.server_round)
    if name := find_difference(before, client.client_states[0]):
        line = place_of(type(client).eval_models)
        return Fault(f"an evaluation changes the client state '{name}'", "writes to stack.state only in local_update", line)
    return None


def check_template(problem: Problem) -> Fault | None:
    """A loss computes with its ``params``, not with the parameters of ``self.model``, which are only a template."""
    tensors = problem.workspace.model.tensors()
    before = copy_tensors(tensors)

    def with_another_template(call: Callable[[], Any]) -> Any:
        try:
            for value in tensors.values():
                value.mul_(0.9).add_(0.01)
            return call()
        finally:
            for name, value in before.items():
                tensors[name].copy_(value)

    plain, other = results_of(problem, [0])[0], with_another_template(lambda: results_of(problem, [0])[0])
    if name := find_difference(plain, other):
        fix = "the tensors of params, such as params['classifier.weight'], and self.forward(params, batch)"
        work = lambda: problem.update([0])  # noqa: E731
        sides = (work, lambda value: value), (lambda: with_another_template(work), lambda value: value)
        line = first_difference(problem.author, *sides) or loss_line(problem)
        return Fault(f"{name} depends on the parameters of self.model, which never train", fix, line)
    return None


def check_direction(problem: Problem) -> Fault | None:
    """Training does not raise the cross-entropy of a client's examples. It compares the update with the gradient."""
    model, received = problem.workspace.model, problem.received[0]
    sent = problem.update([0])[0].tensors
    leaves = {name: value.clone() for name, value in model.tensors().items()}
    leaves |= {name: received[f"model/{name}"].clone() for name in leaves if f"model/{name}" in received}
    moved = [
        name for name in leaves if f"model/{name}" in received and f"model/{name}" in sent and name not in model.buffer_names
    ]
    if not moved:
        raise Skipped("the upload is no model")
    for name in moved:
        leaves[name].requires_grad_()
    with model.holding(leaves):
        loss = nn.functional.cross_entropy(model(problem.images).logits, problem.labels)
    uphill = torch.autograd.grad(loss, [leaves[name] for name in moved], allow_unused=True, materialize_grads=True)
    steps = torch.cat([(sent[f"model/{name}"] - received[f"model/{name}"]).flatten() for name in moved]).to(loss.dtype)
    if torch.cosine_similarity(steps, torch.cat([each.flatten() for each in uphill]), dim=0) > MAX_COSINE:
        return Fault("training raises the cross-entropy of a client's examples", "a loss of the other sign", loss_line(problem))
    return None


def check_parameters(problem: Problem) -> Fault | None:
    """Every layer is part of the network, and every parameter has an influence."""
    model: Any = problem.workspace.model
    if found := find_hidden_layers(model):
        where, kind, key = found
        return Fault(f"{where} hides layers, so that they never train", HIDDEN_FIX, line_of_attribute(kind, key))
    buffers = model.buffer_names
    leaves: Tensors = {name: value.clone().requires_grad_(name not in buffers) for name, value in model.tensors().items()}
    with model.holding(leaves):
        out = model(problem.images).logits
    trained = {name: value for name, value in leaves.items() if value.requires_grad}
    if not out.requires_grad:
        return Fault("the network's output has no gradient", "a forward pass without no_grad and detach", own_class(model))
    grads = torch.autograd.grad(out.sum(), list(trained.values()), allow_unused=True)
    unused = [name for name, found in zip(trained, grads, strict=True) if found is None]
    if unused:
        fix = "its use in the forward pass, or leave the layer out"
        return Fault(
            f"{unused[0]} has no influence on the network's output, and is sent in every round",
            fix,
            unused_line(model, unused[0]),
        )
    return None


def unused_line(model: nn.Module, name: str) -> str:
    """Return the author's line that sets a layer of an own class, else the place of the first own class."""
    path = name.split(".")
    for end in range(len(path) - 1, -1, -1):
        kind = type(model.get_submodule(".".join(path[:end])))
        if kind.__module__.split(".")[0] not in ("torch", "torchvision", "contrafed"):
            return line_of_attribute(kind, path[end])
    return own_class(model)
