"""Turn a composed configuration into a typed ``Run``: parsed once, and checked as a whole before anything is loaded."""

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from contrafed.core import registry
from contrafed.core.client_run import PACKAGES, Choice, ClientRun, choose, client_run_of
from contrafed.core.disk import absent, expand_home, unwritable
from contrafed.core.errors import UserError, unknown
from contrafed.core.metrics import beside_accuracy
from contrafed.core.privacy import central
from contrafed.core.run_folder import read_config
from contrafed.core.schema import OnlyWith, Range, build
from contrafed.core.tracker import check_tracker

# Entries of `log`. `contrafed/runs/diagnostics.py` describes what each one writes.
LOG_CHOICES = ("deviation", "features", "clients_train", "probability", "weights")

SERVER_GROUPS = ("participation", "engine", "privacy", "attack", "aggregation", "tracker", "clock", "schedule")
GROUPS = ("strategy", "dataset", "partition", "participation", "model", "engine", *SERVER_GROUPS[2:])

# Where and how a run is executed, and what of it is kept. No result depends on these, except on the engine's RULING_KEYS, which
# decide which replies are rejected.
HOW_IT_RUNS = (
    "output_dir", "verbose", "engine", "tracker", "resume", "checkpoint_every", "checkpoint_keep", "save_personal",
    "wait_for_clients", "objective",
)  # fmt: skip
RULING_KEYS = ("engine.max_norm", "engine.max_norm_ratio", "engine.round_timeout")
PLACE_KEYS = ("dataset.root", "dataset.download")  # folders of data, on which no number depends either

# The experiment that a configuration is from, and what it is compared with. ``method_keys`` are the keys that an experiment of
# the user's sets for single methods. No number depends on these, or on the scale's name.
LABELS = ("experiment", "published", "changed", "method_keys")
ORIGIN = (*LABELS, "scale")


def counts(key: str, aside: Container[str]) -> bool:
    """Return whether a dotted key is not ``aside``, by its first word. A ruling key never is, and a place always is."""
    return key in RULING_KEYS or (key not in PLACE_KEYS and key.split(".")[0] not in aside)


@dataclass(frozen=True)
class Top:
    """The top-level keys."""

    seed: Annotated[int, Range(ge=0, lt=2**63)]
    federation_seed: Annotated[int, Range(ge=0, lt=2**63)] | None
    settings: Literal["code", "printed"] | None
    num_clients: Annotated[int, Range(ge=1)]
    num_rounds: Annotated[int, Range(ge=1)]
    min_replies: Annotated[int, Range(ge=0)]
    on_divergence: Literal["reject", "stop"]
    eval_every: Annotated[int, Range(ge=1)]
    eval_train: bool
    eval_clients: bool | None
    held_out_clients: Annotated[int, Range(ge=0)]
    metrics: tuple[str, ...]
    evaluate_after: Literal["download", "local_training"]
    early_stop: Annotated[int, Range(ge=1)] | None
    target_accuracy: Annotated[float, Range(gt=0, le=1)] | None
    select_on: Literal["validation", "test"] | None
    init_from: str | None
    checkpoint_every: Annotated[int, Range(ge=1)] | None
    checkpoint_keep: Annotated[int, Range(ge=1), OnlyWith("checkpoint_every")]
    resume: str | None
    log: tuple[str, ...]
    save_personal: bool
    evaluate_only: str | None
    wait_for_clients: Annotated[float, Range(gt=0)] | None
    output_dir: str
    objective: str | None
    verbose: bool

    @property
    def seed_of_federation(self) -> int:
        """The seed of the partition, the participation rates and the availability."""
        return self.seed if self.federation_seed is None else self.federation_seed

    @property
    def num_trained(self) -> int:
        """The number of clients that may train: all except the held-out ones, which are the last."""
        return self.num_clients - self.held_out_clients


@dataclass(frozen=True)
class Run(Top):
    """One run, in the form that the server's code uses."""

    client: ClientRun
    server: Choice  # the server's strategy
    participation: Choice
    engine: Choice
    privacy: Choice
    tracker: Choice
    attack: Choice
    aggregation: Choice
    clock: Choice
    schedule: Choice
    composed: Mapping[str, Any]  # the configuration that this is made of, as in ``config.yaml``
    folder: Path | None = None  # the run's folder, once it has one, and ``resume`` is then a checkpoint's path or None

    @property
    def text(self) -> str:
        """The configuration as YAML, which repeats the whole run. It contains no ``resume``."""
        return OmegaConf.to_yaml(OmegaConf.create({**self.composed, "resume": None}))


def resolve(composed: Mapping[str, Any]) -> Run:
    """Return the run that a composed configuration describes.

    It is called once per run, loads no data and builds no model. ``contrafed.config.method`` makes the checks that need these.

    Raises:
        UserError: For the first mistake.
    """
    import contrafed.data.checks
    import contrafed.data.images
    from contrafed.config import validate
    from contrafed.data.clock import check_clock
    from contrafed.data.participation import pattern_class_of
    from contrafed.server.base import strategy_class_of
    from contrafed.server.privacy import check_rejections
    from contrafed.training.workspace import client_class_of

    config = for_evaluation(composed)
    top = check_top(config)
    _check_keys(config["strategy"])
    client, server = client_run_of(config), server_of(config["strategy"])
    chosen: dict[str, Any] = {group: choose(group, config[group]) for group in SERVER_GROUPS}
    participation = chosen["participation"]
    contrafed.data.images.check(client.dataset)
    contrafed.data.checks.check(client.partition, client.num_clients)
    contrafed.data.checks.check_validation(client.dataset, client.partition)
    if top.held_out_clients and client.partition.config.scarce_clients:
        raise UserError("partition.scarce_clients: held_out_clients are the same ones, and never train. Fix: set one of them")
    asked = participation.config.count(top.num_trained) or top.num_trained
    if top.min_replies > asked:
        who = "participation.select asks" if asked < top.num_trained else "train (held_out_clients)"
        problem = f"more than the {asked} that {who}, so the model would never change"
        raise UserError(f"min_replies={top.min_replies}: {problem}. Fix: {asked} or fewer")
    pattern_class_of(participation)
    check_tracker(chosen["tracker"])
    _check_local_training(client.strategy, top.num_rounds)
    strategy_class = strategy_class_of(server)
    with registry.report_author_errors(
        f"strategy.server={server.name}: {strategy_class.__name__}.check", str(server.module.__file__)
    ):
        strategy_class.check(server.config, client.strategy, participation)
    _check_momentum(client.strategy.config.local, top)
    validate.check_classes(client.strategy, server)
    validate.check_participation(participation, top.num_trained, top.seed_of_federation, top.num_rounds)
    check_clock(chosen["clock"], top.num_trained, top.seed_of_federation)
    validate.check_lateness(participation, chosen["clock"], client.strategy, server)
    validate.check_privacy(chosen["privacy"], client.strategy, server, participation)
    validate.check_schedule(chosen, server, top)
    if isinstance(chosen["privacy"].config, central.Config):
        limits = chosen["engine"].config
        check_rejections(limits.max_norm, limits.max_norm_ratio, top.min_replies, top.on_divergence)
    validate.check_mean(chosen["aggregation"], server, chosen["privacy"])
    validate.check_attack(chosen["attack"], client, top.num_trained)
    check_log(top.log, client.strategy, server, participation, chosen["privacy"])
    own = client_class_of(client.strategy).is_personal(client.strategy.config) or client.model.values.get("buffers") == "local"
    if top.save_personal and not own and top.evaluate_after != "local_training":
        raise UserError(f"save_personal: strategy={client.strategy.name} has only a global model. Fix: save_personal=false")
    client = replace(client, flipped=wrong_labels(chosen["attack"], top))
    return Run(**vars(top), client=client, server=server, **chosen, composed=config)


def check_top(config: Mapping[str, Any]) -> Top:
    """Return the checked top-level keys. Raises ``UserError`` for mistakes that are visible without any group's code."""
    top = build(Top, config, "", ignore=frozenset((*GROUPS, *ORIGIN)))
    top = replace(top, output_dir=os.path.expanduser(top.output_dir), init_from=expand_home(top.init_from))
    for group in GROUPS:
        settings = config.get(group)
        if not isinstance(settings, Mapping) or "name" not in settings:
            raise UserError(f"{group}: missing. Fix: one of {', '.join(registry.choices(group))}")
    beside_accuracy(top.metrics)
    fixes = {"output_dir": "a folder", "resume": "latest, or a path", "init_from": "a path, or leave it out"}
    for key, fix in fixes.items():
        if getattr(top, key) is not None and not str(getattr(top, key)).strip():
            raise UserError(f"{key}: empty. Fix: {fix}")
    try:
        os.stat(top.output_dir)
    except FileNotFoundError:  # it is made later
        pass
    except OSError as error:
        raise unwritable(top.output_dir, error) from None
    if top.min_replies > top.num_clients:
        raise UserError(f"min_replies={top.min_replies}: more than num_clients={top.num_clients}. Fix: a smaller number")
    if top.held_out_clients >= top.num_clients:
        problem = f"none of num_clients={top.num_clients} is left to train"
        raise UserError(f"held_out_clients={top.held_out_clients}: {problem}. Fix: a smaller number")
    for name in top.log:
        if name not in LOG_CHOICES:
            raise unknown("log", name, LOG_CHOICES)
    if config["dataset"]["name"] == "own" and config["partition"]["name"] != "own":
        raise UserError("dataset=own: it has no images to partition. Fix: partition=own, or another dataset")
    if config["engine"]["name"] == "flower" and (top.checkpoint_every is not None or top.resume is not None):
        raise UserError("engine=flower: it has no checkpoints of client state. Fix: engine=ray or engine=local")
    if top.resume is not None and top.evaluate_only is not None:
        raise UserError("resume: it does not go with evaluate_only. Fix: leave one out")
    if top.resume is not None and not config["privacy"].get("seeded_noise", True):
        raise UserError(
            "privacy.seeded_noise=false: rounds that a resumed run repeats would have other noise, which reveals more. "
            "Fix: begin the run in another folder"
        )
    if top.init_from is not None and top.resume is None and not Path(top.init_from).is_file():
        raise absent("init_from", top.init_from)
    return top


def check_log(names: Sequence[str], client: Choice, server: Choice, participation: Choice, privacy: Choice) -> None:
    """Raise ``UserError`` for an entry of ``log`` that the chosen method or participation does not have."""
    from contrafed.data.participation import Heterogeneous
    from contrafed.server.base import FederatedStrategy, strategy_class_of
    from contrafed.training.loop import is_pattern
    from contrafed.training.workspace import client_class_of

    shared, server_class = client_class_of(client).shared_parts(client.config), strategy_class_of(server)
    if any(is_pattern(part) for part in shared):  # some tensors of each part stay on the clients
        shared = ("some",)
    missing = {
        "deviation": "" if shared else "its clients send no part of the model",
        "features": "" if {"encoder", "projector"} <= set(shared) else "its clients keep their encoder or projector",
        "clients_train": ""
        if server_class.has_global_model and {"encoder", "projector", "classifier"} <= set(shared)
        else "it has no global model",
        "weights": f"the strategy {server.name} gives a client that is away no weight"
        if server_class.client_weights is FederatedStrategy.client_weights
        else "",
    }
    for name in names:
        if name in ("deviation", "features") and privacy.name == "central":
            raise UserError(f"log=[{name}]: it reads single replies, which privacy=central hides. Fix: leave it out")
        if name == "probability" and not isinstance(participation.config, Heterogeneous):
            raise UserError(f"log=[probability]: participation={participation.name} has no p_k. Fix: leave it out")
        if missing.get(name):
            raise UserError(f"log=[{name}]: strategy={client.name}: {missing[name]}. Fix: leave it out")


def server_of(strategy: Mapping[str, Any]) -> Choice:
    """Return the strategy of a composed ``strategy`` group. Raises ``UserError``."""
    module = _server_module(strategy)
    return replace(choose("strategy", strategy, module), name=str(strategy.get("server") or strategy["name"]))


def _server_module(strategy: Mapping[str, Any]) -> ModuleType:
    """Return the module that ``strategy.server`` names, or by default the method's ``strategies/NAME.py``."""
    from contrafed.server.base import FederatedStrategy

    if (named := strategy.get("server")) is not None:
        return registry.find("contrafed.strategies", "strategy/server", {"name": named})
    module = registry.find("contrafed.strategies", "strategy", strategy)
    if not registry.own_subclasses(module, FederatedStrategy):
        wanted = "its YAML's defaults may name another's, such as server: fedavg"
        raise UserError(
            f"strategy={strategy['name']}: {module.__name__} has no server strategy (a FederatedStrategy); {wanted}"
        )
    return module


def _check_local_training(strategy: Choice, num_rounds: int) -> None:
    """Raise ``UserError`` for missing training settings, for settings that a method does not support, or for a rate of 0."""
    from contrafed.training.local_training import LocalTraining
    from contrafed.training.workspace import client_class_of

    reason, local = client_class_of(strategy).plain_sgd_reason, getattr(strategy.config, "local", None)
    if not isinstance(local, LocalTraining):
        wanted = "must have `local: LocalTraining` of contrafed.training.local_training, its training settings"
        raise UserError(f"strategy={strategy.name}: Config of {strategy.module.__name__} {wanted}")
    if reason and (local.optimizer != "sgd" or local.momentum):
        wanted = "strategy.local.optimizer=sgd and strategy.local.momentum=0"
        raise UserError(f"strategy={strategy.name}: it needs plain SGD ({reason}). Fix: {wanted}")
    if not local.rate(num_rounds):
        raise UserError(f"strategy.local.lr_decay={local.lr_decay:g}: the rate of round {num_rounds} is 0. Fix: nearer to 1")


def _check_momentum(local: Any, top: Top) -> None:
    """Raise ``UserError`` for a momentum of SGD in settings of training with Adam, which ignores it. Older runs may have it."""
    if local.optimizer == "adam" and local.momentum and top.resume is None and top.evaluate_only is None:
        key, fix = "strategy.local.momentum", "set strategy.local.momentum=0"
        raise UserError(f"{key}={local.momentum:g} does nothing with strategy.local.optimizer=adam. Fix: {fix}")


def wrong_labels(attack: Choice, top: Top) -> tuple[int, ...]:
    """Return the clients whose labels an attack changes. Raises ``UserError`` for attackers that do not exist."""
    from contrafed.engines.attack import Attackers

    flips = isinstance(attack.config, Attackers) and attack.config.flips_labels
    return attack.config.among(top.num_trained, top.seed) if flips else ()


def _check_keys(strategy: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for a key of the ``strategy`` group that is neither the client's nor the strategy's."""
    halves = registry.find(PACKAGES["strategy"], "strategy", strategy), _server_module(strategy)
    known = {name for module in halves for name in module.Config.__dataclass_fields__}
    for key in strategy:
        if key not in known and key not in (*registry.COMMON_KEYS, "server"):
            raise unknown("strategy key", str(key), known)


# Settings of an evaluation of saved models that differ from the run's.
NO_TRAINING = {
    "min_replies": 0, "save_personal": False, "init_from": None, "resume": None, "checkpoint_every": None, "early_stop": None,
    "target_accuracy": None, "privacy": {"name": "none"}, "aggregation": {"name": "mean"}, "schedule": {"name": "synchronous"},
}  # fmt: skip
SCORING_KEYS = ("eval_train", "eval_clients", "metrics")  # the run's, if the command line does not set them
EVALUATION_KEYS = (
    "evaluate_only", "engine", "tracker", "output_dir", "verbose", "wait_for_clients", *SCORING_KEYS,
)  # fmt: skip


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with which ``evaluate_only=PATH`` evaluates the saved models of the run in PATH.

    It is the run's own configuration, except ``EVALUATION_KEYS`` and keys that did not exist then. ``SCORING_KEYS`` were
    already taken from the run. Without ``evaluate_only`` it is ``config`` itself. Raises ``UserError``.
    """
    if config.get("evaluate_only") is None:
        return dict(config)
    if not str(config["evaluate_only"]).strip():
        raise UserError("evaluate_only: empty. Fix: the folder of a finished run")
    folder = Path(str(config["evaluate_only"])).expanduser()
    for name in ("config.yaml", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"evaluate_only: there is no {name} in {folder}. Fix: the folder of a finished run")
    stored = read_config(folder)
    own = {key: config[key] for key in EVALUATION_KEYS}
    if isinstance(stored.get("participation"), dict) and stored["participation"].get("late") == "partial":
        stored["participation"] |= {"late": "drop"}  # it is of training, and not every method takes it
    return {**config, **stored, **own, "evaluate_only": str(folder), **NO_TRAINING}
