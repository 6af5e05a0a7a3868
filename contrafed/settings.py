"""The composed configuration, checked as a whole before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from core import registry
from core.config import Range, build
from core.errors import UserError, unknown

GROUPS = ("strategy", "dataset", "partition", "participation", "model", "engine")


@dataclass(frozen=True)
class Top:
    """The top-level keys."""

    seed: Annotated[int, Range(ge=0, lt=2**63)]
    num_nodes: Annotated[int, Range(ge=1)]
    num_rounds: Annotated[int, Range(ge=1)]
    min_replies: Annotated[int, Range(ge=0)]
    eval_every: Annotated[int, Range(ge=1)]
    eval_train: bool
    eval_nodes: bool | None
    init_from: str | None
    checkpoint_every: Annotated[int, Range(ge=1)] | None
    checkpoint_keep: Annotated[int, Range(ge=1)]
    resume: str | None
    save_personal: bool
    evaluate_only: str | None
    output_dir: str
    verbose: bool


def check(config: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for the first thing that is wrong with a composed configuration; loads no data."""
    import clients.base
    import models.base
    import partitions.images
    import partitions.participation.base
    import partitions.partition
    import strategies.base

    build(Top, config, "", ignore=frozenset(GROUPS))
    for group in GROUPS:
        settings = config.get(group)
        if not isinstance(settings, Mapping):
            raise UserError(f"{group} is missing; choices: {', '.join(registry.choices(group))}")
        if settings.get("name") not in registry.choices(group):
            raise unknown(group, str(settings.get("name")), registry.choices(group))
    if config["min_replies"] > config["num_nodes"]:
        raise UserError(f"min_replies={config['min_replies']} is more than num_nodes={config['num_nodes']}")
    if config["dataset"]["name"] == "own" and config["partition"]["name"] != "own":
        raise UserError("dataset=own has no images to deal out; it goes with partition=own")
    strategies.base.make_config(config["strategy"])
    partitions.images.check_settings(config["dataset"])
    partitions.partition.check_settings(config["partition"], config["num_nodes"])
    partitions.participation.base.check_settings(config["participation"], config["num_nodes"])
    models.base.check_settings(config["model"])
    engine_config(config["engine"])
    if config["engine"]["name"] == "flower" and (config["checkpoint_every"] is not None or config["resume"] is not None):
        raise UserError("engine=flower keeps what nodes remember to itself; checkpoints need engine=ray or engine=local")
    if config["resume"] is not None and config["evaluate_only"] is not None:
        raise UserError("resume and evaluate_only exclude each other")
    if config["save_personal"] and not clients.base.keeps_parts(config["strategy"]):
        raise UserError(f"save_personal: strategy={config['strategy']['name']} has no personal models, only the global one")
    if config["init_from"] is not None and not Path(config["init_from"]).is_file():
        raise UserError(f"init_from: there is no file {config['init_from']}")


# What may differ between a run and the evaluation of its saved models.
NO_TRAINING = {"min_replies": 0, "save_personal": False, "init_from": None, "resume": None, "checkpoint_every": None}
EVALUATION_KEYS = ("evaluate_only", "engine", "output_dir", "verbose", "eval_train", "eval_nodes")


def for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with which ``evaluate_only=PATH`` scores what the run in PATH saved.

    It is the run's own, but for ``EVALUATION_KEYS``; without ``evaluate_only`` it is ``config`` itself. Raises ``UserError``.
    """
    if config.get("evaluate_only") is None:
        return dict(config)
    folder = Path(str(config["evaluate_only"])).expanduser()
    for name in ("config.yaml", "model.safetensors"):
        if not (folder / name).is_file():
            raise UserError(f"evaluate_only: there is no {name} in {folder}; give the folder of a finished run")
    stored = read_config(folder)
    own = {key: config[key] for key in EVALUATION_KEYS}
    return {**stored, **own, "evaluate_only": str(folder), **NO_TRAINING}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration that a run left in its folder. Raises ``UserError`` where it cannot be read."""
    try:
        stored = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read {folder / 'config.yaml'} ({type(error).__name__})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{folder / 'config.yaml'} is no run's configuration")
    return {str(key): value for key, value in stored.items()}


def engine_config(settings: Mapping[str, Any]) -> Any:
    """Return the checked config of ``engine=NAME``."""
    module = registry.find("simulation", "engine", settings)
    return build(module.Config, settings, "engine", ignore=registry.COMMON_KEYS)
