"""Build the method of a run: its strategy is built once per run, and checked against what its clients expect.

``resolve`` checks the configuration alone. The checks here need the model or the strategy itself.
"""

import contextlib
import inspect
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from contrafed.config.run_config import Run
from contrafed.core import registry
from contrafed.core.buffers import has_batch_norm
from contrafed.core.build import InputsError
from contrafed.core.client_run import choose, model_settings
from contrafed.core.errors import UserError
from contrafed.core.inputs import build_model_for, example_inputs
from contrafed.core.privacy import central, none
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import Tensors
from contrafed.core.weights import read_weights
from contrafed.data.clock import make_clock
from contrafed.data.participation import make_participation, pattern_class_of
from contrafed.server.aggregation import make_aggregation
from contrafed.server.base import FederatedStrategy, Population, strategy_class_of
from contrafed.server.buffers import leave_out, list_counters
from contrafed.server.checks import broadcast, eval_model_fault, refuse_edits, sent_fault, state_fault
from contrafed.server.norm_limit import NormLimit
from contrafed.server.privacy import count_protected_kinds
from contrafed.server.schedule import buffered
from contrafed.server.simulated_time import find_stale_obstacle
from contrafed.training.base import Client
from contrafed.training.loop import is_in, is_pattern
from contrafed.training.workspace import client_class_of

# Images of a common size, and their classes.
CHANNELS, SIDE, CLASSES = 3, 32, 10


def check_model(run: Run, model: SplitModel) -> None:
    """Raise ``UserError`` if the clients' messages do not fit ``model``, the privacy or the attack."""
    strategy = run.client.strategy
    client = client_class_of(strategy)
    what = f"strategy={strategy.name}: {client.__name__}.message_spec"
    with _blame(what, client):
        messages: Any = client.message_spec(model, strategy.config)
        if fault := _declared_fault(messages, client, model, strategy.config):
            raise UserError(f"{what} {fault}")
    _check_patterns(run, client, model)
    broadcast_spec, upload_spec = messages
    pulls, key = strategy.config.local.proximal_weight and run.evaluate_only is None, "strategy.local.proximal_weight"
    if pulls and client.own_pull:
        raise UserError(f"{key}: {strategy.name} has its own pull. Fix: set strategy.{client.own_pull}")
    if pulls and not any(name.startswith("model/") for name in broadcast_spec):
        raise UserError(f"{key}: strategy={strategy.name} receives no model to pull to. Fix: {key}=0")
    _check_buffers(run, model, [name.partition("/")[2] for name in upload_spec])
    if not isinstance(run.privacy.config, none.Config):
        count_protected_kinds(list(upload_spec), list(broadcast_spec), strategy.name)
    if run.attack.name != "none" and not run.attack.config.flips_labels and not upload_spec:
        raise UserError(f"attack={run.attack.name}: strategy={strategy.name} sends nothing. Fix: attack=none")


def _check_buffers(run: Run, model: SplitModel, names: Sequence[str]) -> None:
    """Raise ``UserError`` if averaged buffers among the tensors ``names`` do not go with the privacy or the aggregation."""
    sent, aggregation = [name for name in names if name in model.buffer_names], make_aggregation(run.aggregation)
    fault = ""
    if sent and run.privacy.name != "none":
        fault = f"privacy={run.privacy.name} adds no noise to {sent[0]}"
    elif sent and aggregation is not None and not aggregation.by_coordinate:
        fault = f"aggregation={run.aggregation.name} compares whole updates, to which {sent[0]} does not belong"
    if fault:
        raise UserError(f"model.buffers: {fault}. Fix: model.buffers=local or frozen")


def check_batches(run: Run, model: SplitModel, sizes: np.ndarray) -> None:
    """Raise ``UserError`` where BatchNorm would train on a batch of one example. ``sizes`` (K,): training examples."""
    if not has_batch_norm(model) or model.buffers_are == "frozen":
        return
    client, config = client_class_of(run.client.strategy), run.client.strategy.config
    sizes = sizes[: run.num_trained]
    unfit = {size for size in np.unique(sizes).tolist() if size and 1 in client.smallest_batches(config, size).values()}
    if not unfit:
        return
    clients = [number for number, size in enumerate(sizes.tolist()) if size in unfit]
    first = int(sizes[clients[0]])
    key, fix = _fix_batches(client, config, first)
    which = (
        f"{len(clients)} of {len(sizes)} clients have a batch of one example, such as client {clients[0]} with {first} examples"
    )
    raise UserError(f"{key}: {which}, and BatchNorm of model={run.client.model.name} needs two. Fix: {fix}")


def _fix_batches(client: type[Client], config: Any, examples: int) -> tuple[str, str]:
    """Return the key, and a change of it, that leaves a client with so many ``examples`` no batch of one."""
    dropped = replace(config, local=replace(config.local, last_batch="drop"))
    if 1 not in client.smallest_batches(dropped, examples).values():
        return "strategy.local.last_batch", "strategy.local.last_batch=drop or merge"
    many = examples if isinstance(config.local.batch_size, float) and examples > 1 else 10**6
    for key, size in client.smallest_batches(dropped, many).items():
        if size == 1:
            return key, f"{key}=2 or more"
    enough = next(more for more in itertools.count(examples + 1) if 1 not in client.smallest_batches(dropped, more).values())
    return "partition.min_client_size", f"partition.min_client_size={enough}"


def _check_patterns(run: Run, client: type[Client], model: SplitModel) -> None:
    """Raise ``UserError`` where a pattern of ``shared_parts`` fits no tensor of the model."""
    for part in filter(is_pattern, client.shared_parts(run.client.strategy.config)):
        pattern = part.removeprefix("!")
        if pattern != "norm" and not any(is_in(name, (pattern,)) for name in model.tensors()):
            what = f"strategy={run.client.strategy.name}: shared_parts has {part!r}, which no tensor of the model fits"
            raise UserError(f"{what}. Fix: a pattern of names such as {next(iter(model.tensors()))}")


def build_strategy(
    run: Run,
    model: SplitModel,
    population: Population,
    class_proportions: Callable[[], np.ndarray],
    *,
    settings: str,
    num_rounds: int,
    num_local_steps: Callable[[int], int] | None = None,
) -> FederatedStrategy:
    """Build the strategy of a run in its state before the first round. Each run builds its own, because it has state.

    Args:
        run: The run.
        model: The global model.
        population: What the server knows of the clients.
        class_proportions: Returns the class proportions (K, C) of the clients that may train.
        settings: The JSON that clients receive.
        num_rounds: The number of planned rounds.
        num_local_steps: Returns how many local steps a client takes with so many examples.

    Raises:
        UserError: If the author's code fails, in one line with its place.
    """
    strategy, pattern = run.client.strategy, run.participation
    found = strategy_class_of(run.server)
    try:
        with _blame(f"participation={pattern.name}", pattern_class_of(pattern)):
            participation = make_participation(pattern, class_proportions, run.num_trained, run.seed_of_federation, run.seed)
            participation.select_among(population.sizes[: run.num_trained])
        with _blame(f"{_name(run)}.setup", found):
            built = found(
                run.server.config,
                client_class=client_class_of(strategy),
                client_config=strategy.config,
                model=model,
                population=population,
                participation=participation,
                settings=settings,
                num_rounds=num_rounds,
                seed=run.seed,
                max_norm=run.engine.config.max_norm,
                norm_limit=make_norm_limit(run, model.buffer_names),
                min_replies=run.min_replies,
                num_local_steps=num_local_steps,
                after_training=run.evaluate_after == "local_training",
                privacy=run.privacy.config if isinstance(run.privacy.config, central.Config) else None,
                aggregation=make_aggregation(run.aggregation),
                clock=make_clock(run.clock, run.num_trained, run.seed_of_federation),
            )
    except MemoryError as error:
        raise UserError(f"num_clients={run.num_clients} or the model is too large for this machine's memory") from error
    if not hasattr(built, "state"):
        raise UserError(f"{_name(run)}.__init__ must call super().__init__ with all that it is given; or write setup() instead")
    if isinstance(run.schedule.config, buffered.Config):
        assert built.time is not None  # by check_schedule
        built.time = buffered.BufferedTime(run.schedule.config, built.time.clock, built, participation)
    return built


def make_norm_limit(run: Run, buffers: Collection[str]) -> NormLimit:
    """Return the limit on norms relative to other uploads, for a model with these ``buffers``.

    Central privacy has none: its clip bounds every upload.
    """
    ratio = None if isinstance(run.privacy.config, central.Config) else run.engine.config.max_norm_ratio
    return NormLimit(ratio, list_counters(buffers))


def check_strategy(run: Run, strategy: FederatedStrategy, initial: Tensors) -> None:
    """Raise ``UserError`` if a strategy does not send what clients expect, or does not evaluate a whole model."""
    author = type(strategy)
    strategy.mark_begun()
    with _blame(f"{_name(run)}.broadcast", author):
        shared = broadcast(strategy, strategy.broadcast, initial)
    initial = leave_out(initial, strategy.buffers)
    with (
        _blame(f"{_name(run)}.per_client_broadcast", author),
        refuse_edits(strategy, initial.values(), "per_client_broadcast"),
    ):
        own = strategy.per_client_broadcast(initial, 0, False)
    if fault := sent_fault(strategy, shared, {} if own is None else own):
        raise UserError(fault)
    with _blame(f"{_name(run)}.eval_model", author), refuse_edits(strategy, initial.values(), "eval_model"):
        made = strategy.eval_model(dict(initial))
    if fault := eval_model_fault(strategy, initial, made) or state_fault(strategy):
        raise UserError(fault)
    if run.participation.config.late == "stale" and (reason := find_stale_obstacle(strategy)):
        raise UserError(
            f"participation.late=stale: strategy={run.client.strategy.name} cannot use replies to an earlier model: {reason}. "
            "Fix: participation.late=drop"
        )


def try_method(run: Run) -> None:
    """Check the method of a run without its data, on a model for images of a common size. A sweep does so before its first job.

    Raises ``UserError``. What is built here is discarded. A network that is only for other images is left to its job.
    """
    model = _outline(json.dumps(dict(run.client.model.values), sort_keys=True))
    if model is None:
        return
    check_model(run, model)
    population = Population(np.broadcast_to(1, run.num_clients), np.broadcast_to(0, run.num_clients))
    proportions = np.broadcast_to(1 / CLASSES, (run.num_trained, CLASSES))
    strategy = build_strategy(run, model, population, lambda: proportions, settings="", num_rounds=1)
    check_strategy(run, strategy, {name: torch.zeros(()).expand(value.shape) for name, value in model.tensors().items()})


def _name(run: Run) -> str:
    return f"strategy.server={run.server.name}: {strategy_class_of(run.server).__name__}"


def _blame(what: str, author: type) -> contextlib.AbstractContextManager[None]:
    """Return a context that reports errors in it as errors of an author's class."""
    return registry.report_author_errors(what, inspect.getfile(author))


def _declared_fault(messages: Any, client: type[Client], model: SplitModel, config: Any) -> str:
    """Return what is wrong with the names and shapes that a client declares, empty if nothing is."""
    if not isinstance(messages, tuple) or len(messages) != 2 or not all(isinstance(shapes, Mapping) for shapes in messages):
        return f"must return two dictionaries, what a client receives and what it sends, got {type(messages).__name__}"
    for name, shape in (item for shapes in messages for item in shapes.items()):
        if not isinstance(shape, tuple) or not all(isinstance(side, int | np.integer) and side >= 0 for side in shape):
            return f"must return shapes, tuples of whole numbers such as (10, 64), got {shape!r} for {name}"
    shared, tensors = client.list_shared(model, config), model.tensors()
    for name, value in tensors.items():
        if name in shared and messages[0].get(f"model/{name}") != tuple(value.shape):
            return f"must have a client receive model/{name}, of shape {tuple(value.shape)}: its part is in `shared`"
    return ""


@lru_cache(maxsize=1)
def _outline(values: str) -> SplitModel | None:
    """Return the chosen model with parameters that have no values, or None if it cannot be built for these images.

    Weights of a file fit the data's images, so that they are read and not loaded.
    """
    choice = choose("model", json.loads(values))
    if (file := model_settings(choice.values).pretrained) is not None:
        read_weights(file)
    choice = replace(choice, values={**choice.values, "pretrained": None})
    inputs = example_inputs(choice, (CHANNELS, SIDE, SIDE))
    try:
        return build_model_for(choice, inputs, CLASSES, 0, tried=False).to("meta")
    except InputsError:
        return None
