"""Helpers of the tests: a complete federated run on a tiny problem, and the scalar problem of the golden values."""

import csv
import re
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, MetricRecord
from omegaconf import OmegaConf
from torch import nn

from contrafed.config.command_line import check_jobs, check_yaml
from contrafed.config.compose import compose_job, expand_jobs
from contrafed.config.method import try_method
from contrafed.config.run_config import GROUPS, resolve, server_of
from contrafed.core import codec, registry
from contrafed.core.client_run import client_run_of
from contrafed.core.split_model import Features, SplitModel
from contrafed.data.federation import Federation
from contrafed.data.images import ImageData
from contrafed.data.partition import Partition
from contrafed.engines.grid import LocalGrid
from contrafed.server.base import Population, strategy_class_of
from contrafed.training.local_training import LocalTraining
from contrafed.training.workspace import Workspace, install, uninstall

METHODS = ("fedavg", "fedprox", "moon", "fedau", "pmfl", "fedrcl")
# Methods of every kind: with client state, personal parts, tables, uploaded updates, control variates and choices of clients.
SEVERAL = ("fedavg", "pmfl", "fedcrl", "fedproto", "scaffold", "fedala", "mpfedcon", "fedppo")
TWO_STEPS = ("strategy.local.iterations=2", "strategy.local.epochs=null")  # of a run whose training needs no more
# Participants of the golden runs, with clients counted from 0.
FULL_COHORTS, PATTERN = [[0, 1, 2]] * 5, [[0, 1], [1], [0, 2], [], [1, 2]]


def slow(*values):
    """Return a case of a parametrised test that runs with ``-m slow`` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def _compose(*overrides):
    return OmegaConf.to_container(compose_job(list(overrides)), resolve=True)


def check_overrides(*overrides, folder=None):
    """Return one job's run, checked as by the command line."""
    return resolve_and_try(check_yaml(list(overrides), folder))


def checked_jobs(*overrides, folder=None):
    """Return the runs of a sweep's jobs, checked before the first starts."""
    return check_jobs(expand_jobs(list(overrides), folder), folder)


def config_of(*overrides):
    """Return a copy of the composed configuration as plain containers.

    Hydra takes a fifth of a second for each combination of choices. No choice sets anything outside of its group, except an
    experiment or a scale. So each group is composed with its own overrides, once, and the groups are put together.
    """
    own = {group: [] for group in (*GROUPS, "")}
    for override in overrides:
        group = re.split("[.=/]", override)[0]
        if group in ("experiment", "scale") or not group.isidentifier():
            return deepcopy(_compose(*overrides))
        own[group if group in GROUPS else ""].append(override)
    config = deepcopy(_compose(*own.pop("")))
    return config | {group: deepcopy(_compose(*some)[group]) for group, some in own.items() if some}


def resolve_and_try(config):
    """Return the run of a configuration, after a try of its method without data, as before a sweep's first job."""
    run = resolve(config)
    try_method(run)
    return run


def workspace_of(config, **options):
    """Return the Workspace of a composed configuration."""
    return Workspace(client_run_of(config), **options)


def strategy_settings(name, **changes):
    """Return one strategy's YAML with changes. ``local`` is merged, and a ``server`` among them brings its own defaults."""
    server = changes.pop("server", None)
    settings = config_of(f"strategy={name}", *([f"strategy.server={server}"] if server else []))["strategy"]
    settings["local"] |= changes.pop("local", {})
    unknown = set(changes) - set(settings)
    assert not unknown, unknown
    return settings | changes


def make_local_training(**changes):
    """Return a LocalTraining of the defaults in conf/strategy/_local.yaml with changes."""
    files = [OmegaConf.load(registry.CONF / "strategy" / f"{name}.yaml") for name in ("_local_training", "_local")]
    defaults = OmegaConf.to_container(OmegaConf.merge(*files))
    del defaults["defaults"]  # Hydra's list
    return LocalTraining(**defaults | {"augment": ()} | changes)


def few_steps(strategy, given=()):
    """Return a strategy's settings with at most two local steps, or one local epoch, where a test has ``given`` no number."""
    most = {"iterations": 2, "epochs": 1}
    few = {key: min(value, most[key]) for key, value in strategy["local"].items() if key in most and value is not None}
    return strategy if most.keys() & set(given) else strategy | {"local": strategy["local"] | few}


class Schedule:
    """A given participation pattern: a list of clients per round, and the lost replies (round, client)."""

    def __init__(self, rounds, lost=()):
        self.lost = set(lost)
        self.rounds = [np.array(sorted(clients), dtype=np.int64) for clients in rounds]

    def participants(self, server_round):
        return self.rounds[server_round - 1]

    def loses(self, server_round, client):
        return (server_round, client) in self.lost


class Scalar(SplitModel):
    """A model with one parameter w. The logits of an image are w."""

    dropout, embedding_size, num_classes = 0.0, 1, 2

    def __init__(self, value):
        nn.Module.__init__(self)
        self.encoder, self.classifier = nn.Module(), nn.Module()
        self.classifier.w = nn.Parameter(torch.tensor([float(value)], dtype=torch.float64))

    def forward(self, x, dropout_mask=None, with_levels=False, encoded=False):
        z = self.classifier.w.expand(x.shape[0], 1)
        return Features(z, z, ())

    def represent(self, x):
        return self(x).z.clone()  # a network's is no view of its weights either


class Vector(Scalar):
    """A model with a parameter per value. Representation and logits of every image are w, for losses by hand."""

    def __init__(self, value):
        nn.Module.__init__(self)
        self.embedding_size = self.num_classes = len(value)
        self.encoder, self.classifier = nn.Module(), nn.Module()
        self.classifier.w = nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def forward(self, x, dropout_mask=None, with_levels=False, encoded=False):
        z = self.classifier.w.expand(x.shape[0], -1)
        return Features(z, z, ())


def scalar_workspace(settings, model, targets=(0, 6, 3)):
    """Return a Workspace whose client k has one "image", its target a_k, and minimises (w - a_k)^2 / 2."""
    x = torch.tensor(targets, dtype=torch.uint8).view(-1, 1, 1, 1)
    y = torch.zeros(len(targets), dtype=torch.int64)
    data = ImageData(x, y, torch.zeros(len(targets), dtype=torch.bool), (0.0,), (1 / 255,), 2, None)
    parts = [np.array([k]) for k in range(len(targets))]
    federation = Federation(data, Partition(parts, [p[:0] for p in parts], y.numpy(), 2))
    workspace = workspace_of(settings, dtype=torch.float64, federation=federation, model=model)

    class OnTargets(workspace.client_class):
        def task_loss(self, features, batch):
            return ((features.logits[:, 0] - batch.x.flatten()) ** 2 / 2).mean()

    workspace.client_class = OnTargets
    return workspace


def sized_workspace(name, sizes, *, tests=None, **changes):
    """Return a Workspace in float64 with ``sizes[k]`` digits to train on and ``tests[k]``, or 3, to test on for client k."""
    tests = tests or [3] * len(sizes)
    config = config_of(f"num_clients={len(sizes)}", "model=mlp", "model.hidden=[6]", "model.projection=[5]")
    config["strategy"] = strategy_settings(name, **changes)
    workspace = workspace_of(config, dtype=torch.float64)
    parts = np.split(np.arange(sum(sizes) + sum(tests)), np.cumsum([*sizes, *tests])[:-1])
    data = workspace.federation.data
    partition = Partition(parts[: len(sizes)], parts[len(sizes) :], data.y.numpy(), data.num_classes)
    workspace.federation = Federation(data, partition)
    return workspace


def build_received(workspace):
    """Return what a client receives: the initial model, and tables of numbers if the method has tables."""
    down, _ = workspace.client_class.message_spec(workspace.model, workspace.config)
    tables = {name: torch.linspace(0.1, 1, int(np.prod(shape))).reshape(shape).double() for name, shape in down.items()}
    return tables | {f"model/{n}": v for n, v in workspace.initial.items() if f"model/{n}" in down}


def run_scalar(name, rounds, *, start=2.0, targets=(0, 6, 3), stack_size=1, rule=None, **changes):
    """Run a method on the golden problem and return W after each round. ``rule``: another class for the strategy."""
    settings = scalar_settings(name, targets, **changes)
    workspace = scalar_workspace(settings, Scalar(start), targets)
    models, _ = run_strategy(workspace, settings, Schedule(rounds), len(rounds), stack_size=stack_size, rule=rule)
    return [float(model["classifier.w"]) for model in models[1:]]


def run_strategy(
    workspace, settings, participation, num_rounds, *, stack_size=1, grid=None, wrap=None, may_fail=False, rule=None,
    evaluated=(), after_round=None, aggregation=None,
):  # fmt: skip
    """Run a method's client and strategy on a grid, and return the global model before and after each round, and the strategy.

    ``rule``: another class for the strategy. ``evaluated``: the clients that are evaluated every round. ``after_round`` is
    called with each finished ``Round``.
    """
    identity, server = client_run_of(settings).to_json(), server_of(settings["strategy"])
    install(identity, workspace)
    try:
        grid = grid or LocalGrid(settings["num_clients"], stack_size)
        strategy = (rule or strategy_class_of(server))(
            server.config,
            client_class=workspace.client_class,
            client_config=workspace.config,
            model=workspace.model,
            population=Population(workspace.federation.partition.sizes, grid.node_ids),
            participation=participation,
            settings=identity,
            num_rounds=num_rounds,
            seed=settings["seed"],
            aggregation=aggregation,
        )
        models = []

        def on_round(done, arrays):
            assert may_fail or not done.failures  # a failed assertion in a hook fails its client, which does not fail a run
            models.append({n: t.clone() for n, t in codec.from_record(arrays).items()})
            if after_round:
                after_round(done)

        strategy.start(
            wrap(grid) if wrap else grid,
            codec.to_record(workspace.initial),
            num_rounds=num_rounds,
            timeout=None,
            evaluate_config=ConfigRecord({"clients": list(evaluated)}),
            evaluate_fn=lambda server_round, arrays: MetricRecord() if evaluated else None,
            on_round=on_round,
        )
        return models, strategy
    finally:
        uninstall()


def digits_run(
    name, num_rounds=3, *, clients=8, stack_size=1, dtype=torch.float64, schedule=None, model="mlp", may_fail=False,
    client_class=None, rule=None, grid=None, wrap=None, aggregation=None, after_round=None, **changes,
):  # fmt: skip
    """Run a method on digits with unequal clients. Without a ``schedule`` every client participates in every round."""
    config = config_of(f"strategy={name}", f"num_clients={clients}", f"model={model}", "partition.min_client_size=5")
    if model == "mlp":
        config["model"]["hidden"] = [16]
    config["strategy"] = few_steps(strategy_settings(name, **changes), changes.get("local", ()))
    workspace = workspace_of(config, dtype=dtype)
    workspace.client_class = client_class or workspace.client_class
    participation = Schedule(schedule or [range(clients)] * num_rounds)
    how = {"stack_size": stack_size, "grid": grid, "may_fail": may_fail, "rule": rule, "wrap": wrap, "aggregation": aggregation}
    return run_strategy(workspace, config, participation, num_rounds, after_round=after_round, **how)


class Through:
    """A grid whose replies are ``change(messages, replies)``."""

    def __init__(self, grid, change):
        self.grid, self.change = grid, change

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        return self.change(messages, list(self.grid.send_and_receive(messages, timeout=timeout)))


def scalar_settings(name="fedavg", targets=(0, 6, 3), **changes):
    """Return settings of the golden problem: a method trains two steps of rate 0.1 on clients with these targets."""
    local = {"iterations": 2, "epochs": None, "batch_size": 1, "lr": 0.1} | changes.pop("local", {})
    return config_of(f"num_clients={len(targets)}") | {"strategy": strategy_settings(name, local=local, **changes)}


def read_rows(path):
    """Return the rows of a CSV file as dictionaries of text."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def close(a, b, tolerance=1e-9):
    """Assert two models equal within an absolute and relative tolerance."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def stacked_and_alone(workspace, clients=None, kind=None, rounds=2):
    """Assert that a stack's updates are those of its clients alone, and return the stack's last. No stack is retried.

    The default is all clients, and the method's own class.
    """
    clients = list(range(len(workspace.federation.partition.sizes)) if clients is None else clients)
    kind, received = kind or workspace.client_class, build_received(workspace)
    stack, lone = kind(workspace, clients), [kind(workspace, [client]) for client in clients]
    for server_round in range(1, rounds + 1):
        found = stack.update([received] * len(clients), server_round)
        for client, one in zip(lone, found, strict=True):
            (own,) = client.update([received], server_round)
            close(one.tensors, own.tensors)
            close(one.client_state, own.client_state)
            assert one.metrics == pytest.approx(own.metrics, rel=1e-9)
            assert one.num_examples == own.num_examples
            client.client_states = [own.client_state]
        stack.client_states = [update.client_state for update in found]
    return found


def same(a, b):
    """Whether two models are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_images(x, y, test=None, owner=None, num_classes=None):
    """Return ImageData from arrays without checks."""
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    test = torch.zeros(len(y), dtype=torch.bool) if test is None else torch.as_tensor(test)
    classes = num_classes or int(y.max()) + 1
    return ImageData(x, y, test, (0.5,), (0.5,), classes, owner)
