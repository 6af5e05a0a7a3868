"""What a check finds, and how numbers are compared."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from contrafed.check.lines import place_of
from contrafed.check.problem import Problem
from contrafed.training.base import Client

TOLERANCE = 1e-9  # between a client alone and in a stack, in float64, relative to the largest number of a tensor


class Fault(NamedTuple):
    """What a check found: the problem, the author's line if it is known, and the fix."""

    problem: str
    fix: str
    line: str = ""

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.problem}{where}. Fix: {self.fix}"


def fault_of(said: str, line: str = "") -> Fault:
    """Return the fault that an error describes. The error may name its own fix."""
    problem, _, fix = said.partition(". Fix: ")
    return Fault(problem, fix or "that line", line)


class Skipped(Exception):
    """A check that needs what another one found broken."""


def find_difference(one: Mapping[str, Any], other: Mapping[str, Any], what: str = "") -> str:
    """Return the name of the first tensor or number that differs, or ``what`` if it has no name. It is empty if none does."""
    for name in (*one, *(other.keys() - one.keys())):
        if name not in one or name not in other:
            return name or what
        a, b = (torch.as_tensor(side[name]).double() for side in (one, other))
        if a.shape != b.shape:
            return name or what
        size = max(float(a.abs().max()) if a.numel() else 0.0, 1.0)
        if a.numel() and not float((a - b).abs().max()) <= TOLERANCE * size and not bool((a.isnan() & b.isnan()).all()):
            return name or what
    return ""


def results_of(problem: Problem, which: Sequence[int], kind: type[Client] | None = None) -> list[dict[str, Any]]:
    """Return the numbers of each client: losses, upload, client state, and scores."""
    updates, scores = problem.update(which, kind), problem.evaluate(which, kind)
    return [
        {f"loss '{name}'": value for name, value in update.metrics.items()}
        | {f"upload '{name}'": value for name, value in update.tensors.items()}
        | {f"client state '{name}'": value for name, value in update.client_state.items()}
        | {f"score '{name}'": value for name, value in score.metrics.items()}
        for update, score in zip(updates, scores, strict=True)
    ]


def loss_line(problem: Problem) -> str:
    """Return where the author defines the loss, or else the local update. It is empty if both are Contrafed's."""
    kind = problem.workspace.client_class
    for name in ("loss", "task_loss", "local_update", "eval_models", "scores"):
        if getattr(kind, name) is not getattr(Client, name):
            return place_of(getattr(kind, name))
    return ""


def own_class(model: nn.Module) -> str:
    """Return the place of the first layer's class that is neither torch's nor Contrafed's, empty without any."""
    kinds = [type(layer) for layer in model.modules()]
    own = [kind for kind in kinds if kind.__module__.split(".")[0] not in ("torch", "torchvision", "contrafed")]
    return place_of(own[0]) if own else ""
