"""The small problem on which a method is checked: three clients of unequal size, in float64."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import Tensor

from contrafed.check.lines import Author
from contrafed.config.method import build_strategy, check_strategy
from contrafed.config.run_config import Run
from contrafed.core import codec
from contrafed.core.errors import UserError
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors
from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.engines.grid import LocalGrid
from contrafed.server.base import Population, strategy_class_of
from contrafed.server.checks import broadcast
from contrafed.training.base import Client, Evaluation, Update
from contrafed.training.workspace import Workspace, client_class_of, install, uninstall

SIZES, TESTS, BATCH = (10, 6, 3), 3, 4  # examples of each client, and of a batch: clients leave a stack at different steps
EPOCHS = 2  # so that images repeat
ROUNDS = 2


@dataclass
class Problem:
    """A method, its data, and what each client received and its client state in its last round."""

    run: Run
    workspace: Workspace
    author: Author
    received: list[Tensors]
    states: list[Tensors] = field(default_factory=lambda: [{} for _ in SIZES])
    server_round: int = 1

    @property
    def clients(self) -> list[int]:
        """The clients with data."""
        return list(range(len(self.received)))

    @property
    def images(self) -> Tensor:
        """The training examples of client 0 (n, ...), as the network takes them."""
        return self.workspace.images(torch.from_numpy(self.workspace.federation.partition.train(0)))

    @property
    def labels(self) -> Tensor:
        """The labels of these examples (n,)."""
        return self.workspace.labels(torch.from_numpy(self.workspace.federation.partition.train(0)))

    def open(self, which: Sequence[int], kind: type[Client] | None = None) -> Client:
        """Return these clients as a stack, with copies of their states."""
        states = [copy_tensors(self.states[client]) for client in which]
        client: Client = (kind or self.workspace.client_class)(self.workspace, list(which), states)
        return client

    def update(self, which: Sequence[int], kind: type[Client] | None = None) -> list[Update]:
        """Return the updates of these clients as a stack."""
        return self.open(which, kind).update([self.received[client] for client in which], self.server_round)

    def evaluate(self, which: Sequence[int], kind: type[Client] | None = None) -> list[Evaluation]:
        """Return the evaluations of these clients as a stack."""
        return self.open(which, kind).evaluate_clients([self.received[client] for client in which], self.server_round)


def copy_tensors(tensors: Tensors) -> Tensors:
    """Return copies of tensors."""
    return {name: value.clone() for name, value in tensors.items()}


def author_of(run: Run, model: SplitModel) -> Author:
    """Return the author of a run's own parts: method, strategy, network and data."""
    classes = [*client_class_of(run.client.strategy).__mro__, *strategy_class_of(run.server).__mro__]
    classes += [type(layer) for layer in model.modules()]
    return Author([*classes, run.client.model.module, run.client.dataset.module, run.client.partition.module])


def shorten(run: Run, batch: int, epochs: int) -> Run:
    """Return the run with a few epochs of small batches as its local training, if the method's settings allow that."""
    strategy = run.client.strategy
    try:
        local = replace(strategy.config.local, epochs=epochs, iterations=None, batch_size=batch, last_batch="merge", augment=())
        config = replace(strategy.config, local=local)
    except UserError:
        return run
    return replace(run, client=replace(run.client, strategy=replace(strategy, config=config)))


def make_problem(
    run: Run,
    federation: Federation,
    model: SplitModel,
    sizes: Sequence[int] = SIZES,
    dtype: torch.dtype = torch.float64,
    epochs: int = EPOCHS,
) -> Problem:
    """Return the problem of a run on a few of its examples. Each client has several classes, as far as there are some.

    The model is copied. What clients receive is the first broadcast of the run's strategy.
    """
    data = federation.data
    run = shorten(run, min(BATCH, max(sizes)), epochs)
    y, test = data.y.numpy(), data.test.numpy()
    pool = np.flatnonzero(~test) if (~test).any() else np.arange(len(y))
    turn = np.array([(y[pool][:place] == y[pool][place]).sum() for place in range(min(len(pool), 2000))])
    pool = pool[: len(turn)][np.argsort(turn, kind="stable")]  # one example of each class, then a second one of each
    wanted = [*sizes, *[TESTS] * len(sizes)]
    cuts = np.cumsum(wanted)
    parts = np.split(np.resize(pool, cuts[-1]), cuts[:-1])
    empty = [pool[:0]] * max(run.num_clients - len(sizes), 0)
    train, held = parts[: len(sizes)] + empty, parts[len(sizes) :] + empty
    partition = Partition(train, held, y, data.num_classes)
    client = replace(run.client, num_clients=max(run.num_clients, len(sizes)))
    run = replace(run, client=client, num_clients=client.num_clients, held_out_clients=0)
    workspace = Workspace(client, dtype=dtype, federation=Federation(data, partition), model=copy.deepcopy(model))
    # What a method does to the template's own tensors must not change what clients begin with.
    workspace.initial = copy_tensors(workspace.initial)
    strategy = make_strategy(run, workspace)
    shared = broadcast(strategy, strategy.broadcast, workspace.initial)
    own = [strategy.per_client_broadcast(workspace.initial, number, False) or {} for number in range(len(sizes))]
    received = [copy_tensors(shared | each) for each in own]
    return Problem(run, workspace, author_of(run, workspace.model), received)


def make_strategy(
    run: Run,
    workspace: Workspace,
    settings: str = "",
    rounds: int = ROUNDS,
    prepare: Callable[[Any], None] = lambda strategy: None,
) -> Any:
    """Return the strategy of a problem. Every client with data is available. ``prepare`` may change it."""
    sizes = workspace.federation.partition.sizes
    counts = workspace.federation.partition.class_counts()
    nodes = LocalGrid(run.num_clients, 1).node_ids
    population = Population(sizes, nodes, 0, workspace.federation.partition.test_sizes, counts)
    proportions = (counts + 1e-9) / (counts + 1e-9).sum(1, keepdims=True)
    how: dict[str, Any] = {"settings": settings, "num_rounds": rounds}
    strategy = build_strategy(run, workspace.model, population, lambda: proportions, **how)
    strategy.participation.__dict__["participants"] = lambda server_round: np.flatnonzero(sizes)
    prepare(strategy)  # before the author's attributes are noted
    strategy.mark_begun()
    return strategy


def run_rounds(problem: Problem, prepare: Callable[[Any], None] = lambda strategy: None) -> list[str]:
    """Run two rounds with the strategy, store what clients received and their states then, and return the failures.

    ``prepare`` is called with the strategy before it starts.
    """
    workspace, failures = problem.workspace, list[str]()
    method = workspace.client_class
    found: dict[int, tuple[Tensors, Tensors]] = {}

    class Recorded(method):  # type: ignore[misc, valid-type]
        def update(self, received: Sequence[Tensors], server_round: int, deadline: float | None = None) -> list[Update]:
            for client, tensors, state in zip(self.clients, received, self.client_states, strict=True):
                found[client] = copy_tensors(tensors), copy_tensors(state)
            return super().update(received, server_round, deadline)  # type: ignore[no-any-return]

    identity = problem.run.client.to_json()
    workspace.client_class = Recorded
    install(identity, workspace)
    try:
        strategy = make_strategy(problem.run, workspace, identity, prepare=prepare)
        check_strategy(problem.run, strategy, workspace.initial)
        strategy.start(
            LocalGrid(problem.run.num_clients, 1),  # type: ignore[arg-type]
            codec.to_record(workspace.initial),
            num_rounds=ROUNDS,
            timeout=None,
            evaluate_config=ConfigRecord(),
            on_round=lambda done, arrays: failures.extend(done.failures),
        )
    finally:
        workspace.client_class = method
        uninstall()
    if not failures and len(found) == len(problem.received):
        to = workspace.dtype
        received = [found[client][0] for client in problem.clients]
        problem.received = [{n: v.to(to) if v.is_floating_point() else v for n, v in each.items()} for each in received]
        problem.states = [found[client][1] for client in problem.clients]
        problem.server_round = ROUNDS
    return failures
