"""The state of clients after a run: their client state, and the models by which they are evaluated."""

from dataclasses import dataclass

import torch
from helpers import Scalar, Schedule, close, digits_run, run_strategy, scalar_settings, scalar_workspace

from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID

ABSENCES = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5], [0, 2, 3, 7]]
SHORT_TRAINING = {"epochs": 1, "iterations": None, "batch_size": 8, "lr": 0.05}  # unequal data: unequal numbers of steps


@dataclass
class Left:
    """A finished run."""

    models: list  # the global model before and after every round
    client_state: dict  # client -> client state
    strategy: object
    workspace: object = None

    @property
    def w(self):
        """Return the scalar problem's W after each round."""
        return [float(model["classifier.w"]) for model in self.models[1:]]

    def list_state_numbers(self, name):
        """Return a number of each client's state in the scalar problem, by name."""
        return [float(self.client_state[client][name]) for client in sorted(self.client_state)]

    def own(self, client, name="own"):
        """Return a model of a client's state."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): value for key, value in self.client_state[client].items() if key.startswith(prefix)}

    def evaluate_client(self, client, final=True):
        """Return the model by which a client of the scalar problem is evaluated after the last round."""
        one = self.workspace.client_class(self.workspace, [client], [self.client_state.get(client, {})])
        model, rule = self.models[-1], self.strategy
        received = rule.broadcast_for_evaluation(model) | (rule.per_client_broadcast(model, client, True) or {})
        (evaluated,) = one.evaluate_clients([received], len(self.models) - 1, final=final)
        return float(evaluated.model["classifier.w"])


def client_states(grid):
    return {client - FIRST_NODE_ID: grid.client_states.get(client) for client in grid.client_states}


def scalar_left(name, rounds, *, start=2.0, targets=(0, 6, 3), stack_size=1, **changes):
    """Run a method on the golden problem."""
    settings = scalar_settings(name, targets, local={"weight_decay": 0.0} | changes.pop("local", {}), **changes)
    workspace, grid = scalar_workspace(settings, Scalar(start), targets), LocalGrid(len(targets), stack_size)
    models, strategy = run_strategy(workspace, settings, Schedule(rounds), len(rounds), grid=grid)
    return Left(models, client_states(grid), strategy, workspace)


def scalar_client(name, target, start=0.0, **changes):
    """Return the only client of a scalar problem. ``start`` is the initial model."""
    local = {"iterations": 1, "weight_decay": 0.0} | changes.pop("local", {})
    settings = scalar_settings(name, (target,), local=local, **changes)
    workspace = scalar_workspace(settings, Scalar(start), (target,))
    return workspace.client_class(workspace, [0])


def build_broadcast(**groups):
    """Return what a client of the scalar problem receives, a number for each group."""
    return {f"{name}/classifier.w": torch.tensor([value], dtype=torch.float64) for name, value in groups.items()}


def digits_left(name, rounds=ABSENCES, *, stack_size=1, **changes):
    """Run a method on digits in float64, as ``digits_run`` does."""
    grid = LocalGrid(8, stack_size)
    changes["local"] = SHORT_TRAINING | changes.pop("local", {})
    models, strategy = digits_run(name, len(rounds), schedule=rounds, grid=grid, **changes)
    return Left(models, client_states(grid), strategy)


def stacked_equals_alone(name, tolerance=1e-9, **changes):
    """Assert that clients in a stack end as they do alone, with absences. Return the run alone."""
    alone, stacked = digits_left(name, **changes), digits_left(name, stack_size=4, **changes)
    for one, other in zip(alone.models, stacked.models, strict=True):
        close(one, other, tolerance)
    assert alone.client_state.keys() == stacked.client_state.keys()
    for client, memory in alone.client_state.items():
        close(memory, stacked.client_state[client], tolerance)
    return alone
