"""Helpers of the methods' tests: clients and strategies set by hand, and runs whose clients have client state."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from helpers import (
    Schedule,
    Vector,
    config_of,
    digits_run,
    run_strategy,
    scalar_settings,
    scalar_workspace,
    strategy_settings,
    with_images,
    workspace_of,
)

from contrafed.config.run_config import server_of
from contrafed.core.client_run import choose
from contrafed.core.split_model import Features
from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.engines.grid import LocalGrid
from contrafed.server.base import Population, Replies, Reply, strategy_class_of
from contrafed.training.base import Batch, ClientStack
from contrafed.training.workspace import client_class_of

# For each strategy: changes, and the model after each round, under full participation and under PATTERN.
GOLDEN = {
    "fedavg": ({}, [2.190000, 2.343900, 2.468559, 2.569533, 2.651322], [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]),
    "fedau": (
        {"cutoff": 2},
        [2.190000, 2.343900, 2.468559, 2.569533, 2.651322],
        [2.126667, 2.371978, 2.301302, 2.301302, 2.680013],
    ),
    "pmfl": ({}, [2.190000, 2.214938, 2.296825, 2.401933, 2.515566], [2.126667, 2.232486, 2.140504, 2.145388, 2.687577]),
    "fedavgm": ({}, [2.190000, 2.419900, 2.622079, 2.774756, 2.878623], [2.190000, 2.989900, 3.026779, 3.026779, 3.321443]),
    "fedadam": (
        {"server_lr": 0.1},
        [2.094876, 2.223932, 2.373920, 2.536390, 2.704222],
        [2.094876, 2.212567, 2.300121, 2.300121, 2.416998],
    ),
    "fedagm": ({}, [2.189980, 2.474672, 2.770489, 3.017767, 3.184646], [2.189980, 3.044612, 3.339595, 3.339595, 3.763150]),
    "fedvarp": ({}, [2.190000, 2.343900, 2.468559, 2.569533, 2.651322], [2.190000, 2.280567, 2.436892, 2.436892, 2.541015]),
    "mifa": ({}, [2.190000, 2.343900, 2.468559, 2.569533, 2.651322], [2.126667, 2.245311, 2.396216, 2.547121, 2.652283]),
    "fedhyper": ({}, [2.190000, 2.348400, 2.478183, 2.583334, 2.667917], [2.190000, 3.013466, 2.746216, 2.746216, 3.023973]),
    "fedexp": (
        {"epsilon": 0.1},
        [2.190000, 2.343900, 2.469131, 2.572938, 2.657892],
        [2.251984, 2.964107, 2.685927, 2.685927, 3.030601],
    ),
    "fednova": ({}, [2.190000, 2.343900, 2.468559, 2.569533, 2.651322], [2.190000, 2.913900, 2.645259, 2.645259, 2.997660]),
    "fedawe": (
        {"clip_norm": None},
        [2.190000, 2.343900, 2.468559, 2.569533, 2.651322],
        [2.190000, 2.913900, 1.963900, 1.963900, 3.515297],
    ),
}
LOCAL = [1.062882, 3.874236, 2.468559]  # each client alone after three full rounds: w := a + (w - a) 0.9^2 a round

EPOCH = {"epochs": 1, "iterations": None, "batch_size": 7, "optimizer": "sgd", "lr": 0.05, "momentum": 0.0}
ROUNDS = [[0, 1, 2, 3], [1, 3, 4, 5], [0, 1, 6, 7]]


def client_of(name, **changes):
    """Return a client whose representation of every image is its two parameters."""
    settings = config_of("num_clients=1") | {"strategy": strategy_settings(name, **changes)}
    workspace = scalar_workspace(settings, Vector([1.0, 0.0]), targets=(1,))
    return workspace.client_class(workspace, [0])


def losses_of(client, now, y=0, **loss_inputs):
    """Return the losses of one example at the two parameters ``now`` with the given loss inputs, and the parameters."""
    w = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch(torch.ones(1, 1, 1, 1, dtype=torch.float64), torch.tensor([y]), one, one)
    tensors = {n: v if isinstance(v, Features) else torch.as_tensor(v, dtype=torch.float64) for n, v in loss_inputs.items()}
    return client.loss({"classifier.w": w}, batch, tensors), w


def class_losses(name, w, y=0, changes=None, **loss_inputs):
    """Return the same as ``losses_of`` with cross-entropy, for one example whose logits are the numbers of ``w``."""
    settings = config_of("num_clients=1") | {"strategy": strategy_settings(name, **changes or {})}
    data = with_images(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), [y], num_classes=len(w))
    federation = Federation(data, Partition([np.arange(1)], [np.arange(0)], data.y.numpy(), len(w)))
    workspace = workspace_of(settings, dtype=torch.float64, federation=federation, model=Vector(w))
    return losses_of(workspace.client_class(workspace, [0]), w, y, **loss_inputs)


def prototypes_of(workspace, clients):
    """Clients' class means and counts under the initial model."""
    client = workspace.client_class(workspace, clients)
    params = {n: v.expand(len(clients), *v.shape) for n, v in workspace.initial.items()}
    examples = [workspace.federation.partition.train(client) for client in clients]
    return tuple(client.prototypes(ClientStack(clients, examples, 1, params, {}, {})).values())


def rule_of(name, sizes=(1,), down=None, **changes):
    """Return a method's strategy for clients with so many examples. Its model is one number w."""
    settings = strategy_settings(name, **changes)
    server = server_of(settings)
    down = {"model/w": (1,)} | (down or {})
    chosen = choose("strategy", settings)
    client = SimpleNamespace(message_spec=lambda model, config: (down, down), is_personal=lambda config: False)
    client.upload_training = client_class_of(chosen).upload_training
    return strategy_class_of(server)(
        server.config,
        client_class=client,
        client_config=chosen.config,
        model=torch.nn.Module(),
        population=Population(np.array(sizes), np.arange(1000, 1000 + len(sizes))),
        participation=Schedule([]),
        settings="",
        num_rounds=1,
        seed=0,
    )


def path(strategy, updates, start=0.0):
    """Return the model and the broadcast after each round.

    An update is client 0's Delta, a dictionary of Deltas by client, or None without replies.
    """
    model, models, sent = {"w": torch.tensor([start], dtype=torch.float64)}, [], []
    for update in updates:
        begin = strategy.broadcast(model)
        deltas = {} if update is None else update if isinstance(update, dict) else {0: update}
        replies = [Reply(client, {"model/w": begin["model/w"] + delta}, 1, {}, begin) for client, delta in deltas.items()]
        model = model | strategy.next_model(model, Replies(replies))
        models.append(float(model["w"]))
        sent.append(float(strategy.broadcast(model)["model/w"]))
    return models, sent


def golden_memory(name, rounds, **changes):
    """Return the client states after a run of the golden problem, by client."""
    settings = scalar_settings(name, **changes)
    model = Vector([2.0, 2.0])  # the loss is the first parameter's alone
    model.encoder = torch.nn.Flatten()
    grid = LocalGrid(3, 1)
    run_strategy(scalar_workspace(settings, model), settings, Schedule(rounds), len(rounds), grid=grid)
    return {client - 1000: grid.client_states.get(client) for client in grid.client_states}


def whole(name, schedule=ROUNDS, stack_size=1, clients=8, **changes):
    """Run on digits, and return (global model, every client's state, the strategy)."""
    config = config_of(f"strategy={name}", f"num_clients={clients}", "model=mlp", "model.hidden=[12]", "model.projection=[9]")
    config["strategy"] = strategy_settings(name, **{**changes, "local": EPOCH | changes.get("local", {})})
    grid, workspace = LocalGrid(clients, stack_size), workspace_of(config, dtype=torch.float64)
    models, strategy = run_strategy(workspace, config, Schedule(schedule), len(schedule), grid=grid)
    memory = {
        f"{client}/{name}": tensor for client in grid.client_states for name, tensor in grid.client_states.get(client).items()
    }
    return models[-1], memory, strategy


WORK = EPOCH | {"batch_size": 16, "lr": 0.1, "weight_decay": 0.0, "lr_decay": 1.0, "clip_norm": None}
COHORTS_WITH_ABSENCES = [[0, 1, 2, 3], [1, 4], [], [0, 4]]  # participants of five clients


def as_fedavg(name, schedule=COHORTS_WITH_ABSENCES, **changes):
    """Return the models of two runs with absent clients: a method with these changes, and FedAvg with equal local training."""
    ours, _ = digits_run(name, len(schedule), clients=5, schedule=schedule, local=WORK, **changes)
    return [ours, _fedavg(strategy_settings(name, **changes)["weights"], tuple(map(tuple, schedule)))]


@cache
def _fedavg(weights, schedule):
    return digits_run("fedavg", len(schedule), clients=5, schedule=schedule, local=WORK, weights=weights)[0]


def heads(memory):
    """Return the personal parts of the client states."""
    return {n: v for n, v in memory.items() if "/personal/" in n}
