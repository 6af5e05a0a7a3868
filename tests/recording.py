"""A small problem with unusual clients, and a recorded run of a method on it: messages, client states and scores."""

import json
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import MessageType
from helpers import Schedule, Through, config_of, run_strategy, workspace_of
from sklearn.datasets import load_digits

from contrafed.core import codec
from contrafed.core.tensors import on_host
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.server.base import Round

CLIENTS = 8
TRAIN_SIZES = (21, 9, 1, 17, 30, 12, 26, 0)  # one client holds a single example, one none, and two have a last batch of one
TEST_SIZES = (4, 4, 1, 0, 6, 4, 3, 5)
# Clients 0 and 2 are absent and return. Round 3 has no client. A cohort exceeds a stack.
ROUNDS = ((0, 1, 2, 3), (1, 3, 4, 5), (), (0, 1, 2, 4, 6))
STACK_SIZE = 4


@dataclass
class Run:
    """The record of a run. Lists have an item per round, with the initial state first."""

    models: list = field(default_factory=list)  # the global model
    client_states: list = field(default_factory=list)  # {client: client state}
    rounds: list[Round] = field(default_factory=list)
    trained: list = field(default_factory=list)  # (message, reply) of every training
    scored: list = field(default_factory=list)  # and of every evaluation
    arrived: list = field(default_factory=list)  # (round, client, client state when asked to train)
    workspace: object = None


def write_problem(folder):
    """Write digits, partition and trace files below ``folder``, and return the overrides that select them."""
    x, y = load_digits(return_X_y=True)
    central = np.arange(len(y)) % 45 == 0
    own = np.flatnonzero(~central)[: sum(TRAIN_SIZES) + sum(TEST_SIZES)]
    own = own[np.argsort(y[own] // 2, kind="stable")]  # neighbours share two classes
    parts = np.split(own, np.cumsum(TRAIN_SIZES + TEST_SIZES)[:-1])
    lists = {"train": [p.tolist() for p in parts[:CLIENTS]], "test": [p.tolist() for p in parts[CLIENTS:]]}
    np.savez(folder / "digits.npz", x=(x * 15).astype(np.uint8).reshape(-1, 8, 8), y=y, split=central.astype(int))
    (folder / "clients.json").write_text(json.dumps(lists))
    there = [f"{client},{t + 1},1" for t, clients in enumerate(ROUNDS) for client in clients]
    (folder / "there.csv").write_text("\n".join(["client,round,available", *there]))
    return (
        "dataset=npz", f"dataset.path={folder}/digits.npz", "partition=file", f"partition.path={folder}/clients.json",
        f"num_clients={CLIENTS}", f"num_rounds={len(ROUNDS)}", "participation=trace", f"participation.path={folder}/there.csv",
        "model=mlp", "model.hidden=[16]", "model.projection=[12]", "engine=local", "eval_every=1", "eval_clients=true",
    )  # fmt: skip


def small_steps(config, **local):
    """Return the configuration with batches of 8 and short last ones, so that clients take different numbers of steps."""
    local = {"epochs": min(config["strategy"]["local"]["epochs"] or 1, 2), "iterations": None, "batch_size": 8} | local
    return config | {"strategy": config["strategy"] | {"local": config["strategy"]["local"] | local}}


def watch(config, rounds=ROUNDS, *, stack_size=1, evaluate=True, trouble=None, device="cpu"):
    """Run a method in float64 and return its record.

    ``trouble(server_round, clients, sent)`` gets a stack's uploads before they are sent, and may change them or raise.
    """
    found = Run(workspace=workspace_of(config, dtype=torch.float64, device=device))
    grid, method = LocalGrid(CLIENTS, stack_size), found.workspace.client_class

    class Watched(method):
        def update(self, received, server_round, deadline=None):
            found.arrived += [(server_round, n, copy_tensors(m)) for n, m in zip(self.clients, self.client_states, strict=True)]
            return super().update(received, server_round, deadline)

        def local_update(self, stack):
            sent = super().local_update(stack)
            if trouble:
                trouble(stack.server_round, stack.clients, sent)
            return sent

    def record(messages, replies):
        for pair in zip(messages, replies, strict=True):
            (found.trained if pair[0].metadata.message_type == MessageType.TRAIN else found.scored).append(pair)
        return replies

    def after_round(done):
        found.rounds.append(done)
        found.client_states.append(
            {client - FIRST_NODE_ID: copy_tensors(grid.client_states.get(client)) for client in grid.client_states}
        )

    found.workspace.client_class = Watched
    found.models, _ = run_strategy(
        found.workspace,
        config,
        Schedule(rounds),
        len(rounds),
        grid=grid,
        wrap=lambda grid: Through(grid, record),
        may_fail=trouble is not None,
        evaluated=range(CLIENTS) if evaluate else (),
        after_round=after_round,
    )
    return found


def copy_tensors(tensors):
    """Return copies on the host, because a client state may be written to later."""
    return {name: value.clone() for name, value in on_host(tensors).items()}


def shapes(record):
    """Return names and shapes of a record of arrays."""
    return {name: tuple(array.shape) for name, array in record.items()}


def numbers(done):
    """Return everything a round reports, by name: losses, scores, and a column per client."""
    columns = {
        name: dict(zip(clients.tolist(), values.tolist(), strict=True))
        for name, (clients, values) in done.client_metrics.items()
    }
    each = {f"{name}/{client}": value for name, column in columns.items() for client, value in column.items()}
    return done.metrics | (done.client_evaluation or {}) | each


def settings_of(method, problem, **local):
    """Return the composed configuration of a method on the problem."""
    return small_steps(config_of(f"strategy={method}", *problem), **local)


def sent_tensors(pair):
    """The tensors of a message and its reply, by name."""
    return [item for message in pair for item in codec.from_record(message.content["arrays"]).items()]
