"""The state of clients after a run: their client state, and the models by which they are evaluated."""

from dataclasses import dataclass

import torch
from rig import Scalar, Schedule, close, config_of, digits_run, run_strategy, scalar_workspace, strategy_settings

from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID

FULL_COHORTS = [[0, 1, 2]] * 5
PATTERN = [[0, 1], [1], [0, 2], [], [1, 2]]
ABSENCES = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5], [0, 2, 3, 7]]
SHORT_TRAINING = {"epochs": 1, "iterations": None, "batch_size": 8, "lr": 0.05}  # unequal data: unequal numbers of steps


@dataclass
class Left:
    """A finished run."""

    models: list  # the global model before and after every round
    memory: dict  # client -> client state
    strategy: object
    workspace: object = None

    @property
    def w(self):
        """Return the scalar problem's W after each round."""
        return [float(model["classifier.w"]) for model in self.models[1:]]

    def list_state_numbers(self, name):
        """Return a number of each client's state in the scalar problem, by name."""
        return [float(self.memory[node][name]) for node in sorted(self.memory)]

    def own(self, node, name="own"):
        """Return a model of a client's state."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): value for key, value in self.memory[node].items() if key.startswith(prefix)}

    def evaluate_client(self, node, final=True):
        """Return the model by which a client of the scalar problem is evaluated after the last round."""
        client = self.workspace.client_class(self.workspace, [node], [self.memory.get(node, {})])
        model, rule = self.models[-1], self.strategy
        received = rule.broadcast_for_evaluation(model) | (rule.download(model, node, True) or {})
        (judged,) = client.judge([received], len(self.models) - 1, final=final)
        return float(judged.model["classifier.w"])


def memories(grid):
    return {node - FIRST_NODE_ID: grid.memory.get(node) for node in grid.memory}


def scalar_left(name, rounds, *, start=2.0, targets=(0, 6, 3), stack_size=1, **changes):
    """Run a method on the golden problem."""
    local = {"iterations": 2, "epochs": None, "batch_size": 1, "lr": 0.1, "weight_decay": 0.0} | changes.pop("local", {})
    settings = config_of(f"num_nodes={len(targets)}") | {"strategy": strategy_settings(name, local=local, **changes)}
    workspace, grid = scalar_workspace(settings, Scalar(start), targets), LocalGrid(len(targets), stack_size)
    models, strategy = run_strategy(workspace, settings, Schedule(rounds), len(rounds), grid=grid)
    return Left(models, memories(grid), strategy, workspace)


def scalar_node(name, target, start=0.0, **changes):
    """Return the only client of a scalar problem. ``start`` is the initial model."""
    local = {"iterations": 1, "epochs": None, "batch_size": 1, "lr": 0.1, "weight_decay": 0.0} | changes.pop("local", {})
    settings = config_of("num_nodes=1") | {"strategy": strategy_settings(name, local=local, **changes)}
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
    return Left(models, memories(grid), strategy)


def stacked_equals_alone(name, tolerance=1e-9, **changes):
    """Assert that clients in a stack end as they do alone, with absences. Return the run alone."""
    alone, stacked = digits_left(name, **changes), digits_left(name, stack_size=4, **changes)
    for one, other in zip(alone.models, stacked.models, strict=True):
        close(one, other, tolerance)
    assert alone.memory.keys() == stacked.memory.keys()
    for node, memory in alone.memory.items():
        close(memory, stacked.memory[node], tolerance)
    return alone
