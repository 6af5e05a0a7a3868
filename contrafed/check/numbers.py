"""Checks of a method that runs: numbers that must agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from contrafed.check.fault import Fault, Skipped, fault_of, find_difference, loss_line, results_of
from contrafed.check.first_difference import first_difference
from contrafed.check.lines import anomalous_line, place_of
from contrafed.check.problem import Problem, run_rounds
from contrafed.server.base import strategy_class_of
from contrafed.server.replies import Replies
from contrafed.training.batches import Batch, Batches
from contrafed.training.errors import LocalError

IN_PLACE = "modified by an inplace operation"


def check_work(problem: Problem) -> Fault | None:
    """Each client trains and is evaluated alone."""
    for work in (problem.update, problem.evaluate):
        for client in problem.clients:
            try:
                work([client])
            except LocalError as error:
                cause = error.__cause__ or error
                line = anomalous_line(problem.author, lambda: problem.update([0])) if IN_PLACE in str(cause) else ""
                if line:
                    fix = "an edit that makes a new tensor, such as x = x + 1 in place of x += 1"
                    return Fault("an in-place edit changes what this line computed and the gradient needs", fix, line)
                return fault_of(str(error))
    return None


def check_rounds(problem: Problem) -> Fault | None:
    """Two rounds run with the strategy."""
    try:
        failures = run_rounds(problem)
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return fault_of(f"the strategy raises {said}", problem.author.find_line(error))
    return fault_of(failures[0]) if failures else None


def check_weights(problem: Problem) -> Fault | None:
    """With ``strategy.weights=samples`` the strategy takes clients by their numbers of examples."""
    kind, models = strategy_class_of(problem.run.server), []
    own = problem.author.wrote(kind.aggregate.__code__.co_filename) and not kind.__module__.startswith("contrafed.")
    if not own or getattr(problem.run.server.config, "weights", "") != "samples":
        return None
    for turn in (1, -1):

        def prepare(strategy: Any, turn: int = turn) -> None:
            plain = strategy.aggregate

            def aggregate(model: Any, replies: Replies) -> Any:
                counts = replies.num_examples[::turn].astype(int).tolist()
                taken = [replace(reply, num_examples=count) for reply, count in zip(replies, counts, strict=True)]
                models.append(plain(model, Replies(taken, replies.aggregation)))
                return models[-1]

            strategy.__dict__["aggregate"] = aggregate

        run_rounds(problem, prepare)
    if not models or find_difference(models[0], models[len(models) // 2]):
        return None
    fix = "self.mean(model, replies), or replies.num_examples as weights, or weights: uniform in the YAML"
    return Fault("strategy.weights=samples has no influence on the aggregated model", fix, place_of(kind.aggregate))


def check_repeats(problem: Problem) -> Fault | None:
    """Two calls with the same input give the same output."""
    first, second = (results_of(problem, [0])[0] for _ in range(2))
    if name := find_difference(first, second):
        fix, side = "draws by contrafed.core.randomness, and state only in stack.state", (lambda: problem.update([0]), whole)
        line = first_difference(problem.author, side, side) or loss_line(problem)
        return Fault(f"two calls with the same input differ in {name}", fix, line)
    return None


def check_stack(problem: Problem) -> Fault | None:
    """Clients as a stack give the numbers that each gives alone, in float64, in their first round and in a later one."""
    first = replace(problem, states=[{} for _ in problem.states])
    return compare_stack(first) or (compare_stack(problem) if any(problem.states) else None)


def compare_stack(problem: Problem) -> Fault | None:
    """Compare clients as a stack with each alone, from the problem's client states."""
    alone = [results_of(problem, [client])[0] for client in problem.clients]
    skip_one_by_one(problem)
    try:
        stacked = results_of(problem, problem.clients)
    except LocalError as error:
        line = problem.author.find_line(error.__cause__ or error)
        fix = "torch.where instead of a branch on a tensor, no .item(), no draw within a loss"
        return Fault(f"clients as a stack raise {str(error.__cause__ or error).splitlines()[0]}", fix, line)
    for client, (one, other) in enumerate(zip(alone, stacked, strict=True)):
        if name := find_difference(one, other):
            fix = "a loss of one client that depends on its batch alone, with means over batch.mask, without float32 constants"
            line = stack_line(problem, client)
            return Fault(f"client {client} alone and in a stack differ in {name}", fix, line or loss_line(problem))
    return None


def skip_one_by_one(problem: Problem) -> None:
    """Raise ``Skipped`` if the network's clients never train as a stack."""
    if reason := problem.workspace.model.one_by_one:
        raise Skipped(f"clients train one by one, because {reason}")


def whole(value: Tensor) -> Tensor:
    """Compare whole tensors."""
    return value


def stack_line(problem: Problem, client: int) -> str:
    """Return the author's first line with a number of a client that differs alone and in a stack."""
    every, size = problem.clients, len(problem.clients)
    return first_difference(
        problem.author,
        (lambda: problem.update([client]), lambda value: value.reshape(()) if value.numel() == 1 else None),
        (lambda: problem.update(every), lambda value: value[client] if value.shape == (size,) else None),
    )


def check_padding(problem: Problem) -> Fault | None:
    """Images and labels of padded examples have no influence."""
    skip_one_by_one(problem)
    try:
        plain = results_of(problem, problem.clients)
        with padded_with_noise():
            other = results_of(problem, problem.clients)
    except LocalError as error:
        raise Skipped("clients as a stack raise") from error
    for one, two in zip(plain, other, strict=True):
        if name := find_difference(one, two):
            line = padding_line(problem)
            fix = "masked_mean or cross_entropy of contrafed.training.losses with batch.mask, and without(...) for negatives"
            return Fault(f"padded examples change {name}", fix, line or loss_line(problem))
    return None


def padding_line(problem: Problem) -> str:
    """Return the author's first line with a number of a client that depends on padded examples."""

    def pick(value: Tensor) -> Tensor | None:
        return value if value.shape == (len(problem.clients),) else None

    def noisy() -> None:
        with padded_with_noise():
            problem.update(problem.clients)

    return first_difference(problem.author, (lambda: problem.update(problem.clients), pick), (noisy, pick))


@contextmanager
def padded_with_noise() -> Iterator[None]:
    """Have padded examples other images and another label, where they are the data's first example otherwise."""
    before = Batches.at

    def at(self: Batches, step: int, clients: int, inputs: Any = None) -> Batch:
        batch = before(self, step, clients, inputs)
        padded = batch.mask == 0
        shape = (*padded.shape, *[1] * (batch.x.dim() - 2))
        noise = torch.linspace(-3, 5, batch.x.numel(), dtype=batch.x.dtype, device=batch.x.device).reshape(batch.x.shape)
        classes = self.workspace.federation.data.num_classes
        x = torch.where(padded.reshape(shape), noise, batch.x)
        return batch._replace(x=x, y=torch.where(padded, (batch.y + 1) % classes, batch.y))

    Batches.at = at  # type: ignore[method-assign]
    try:
        yield
    finally:
        Batches.at = before  # type: ignore[method-assign]


def check_examples(problem: Problem) -> Fault | None:
    """In evaluation an example's scores do not depend on the others of its batch."""
    client = problem.open([0])
    x, params = problem.images[:5], problem.workspace.initial
    received = {name: value.double() for name, value in problem.received[0].items()}

    def features(images: Tensor) -> Any:
        return client.features(params, images)

    with torch.no_grad():
        together, alone = features(x), [features(x[k : k + 1]) for k in range(len(x))]
        if find_difference({"logits": together.logits}, {"logits": torch.cat([each.logits for each in alone])}):
            layer, place = mixing_layer(problem.workspace.model, x)
            first = lambda value: value[0] if value.dim() else None  # noqa: E731
            line = first_difference(problem.author, (lambda: features(x), first), (lambda: features(x[:1]), first)) or place
            fix = "means and deviations of each image alone, or BatchNorm with running statistics"
            return Fault(f"the network mixes the images of a batch in {layer}", fix, line)
        try:
            scores = client.scores(together, received)
            each = torch.cat([client.scores(one, received) for one in alone])
        except KeyError as error:
            raise Skipped(f"scores reads {error}, which eval_models adds") from error
    if find_difference({"scores": scores}, {"scores": each}):
        fix = "scores of each example from its own features"
        return Fault("scores mixes the examples of a batch", fix, place_of(type(client).scores))
    return None


def mixing_layer(model: nn.Module, x: Tensor) -> tuple[str, str]:
    """Return the first layer whose output for an image depends on the others, and the line of its forward pass."""
    outputs: dict[str, list[Tensor]] = {}
    handles = [
        layer.register_forward_hook(lambda module, given, out, name=name: outputs.setdefault(name, []).append(out))
        for name, layer in model.named_modules()
        if name
    ]
    try:
        model(x)
        model(x[:1])
    finally:
        for handle in handles:
            handle.remove()
    for name, found in outputs.items():
        tensors = len(found) == 2 and all(isinstance(each, Tensor) for each in found) and len(found[0]) == len(x)
        if tensors and find_difference({"": found[0][:1]}, {"": found[1]}, "layer"):
            layer = model.get_submodule(name)
            return f"{name} ({type(layer).__name__})", place_of(type(layer).forward)
    return "its forward pass", place_of(type(model).forward)
