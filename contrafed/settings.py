"""The composed configuration, checked as a whole before anything is loaded."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from contrafed import registry
from contrafed.config import Range, build
from contrafed.errors import UserError, unknown

GROUPS = ("strategy", "dataset", "partition", "participation", "model", "engine")


@dataclass(frozen=True)
class Top:
    """The top-level keys."""

    seed: Annotated[int, Range(ge=0, lt=2**63)]
    num_nodes: Annotated[int, Range(ge=1)]
    num_rounds: Annotated[int, Range(ge=1)]
    eval_every: Annotated[int, Range(ge=1)]
    eval_train: bool
    eval_nodes: bool | None
    init_from: str | None
    output_dir: str
    verbose: bool


def check(config: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for the first thing that is wrong with a composed configuration; loads no data."""
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
    strategies.base.make_config(config["strategy"])
    partitions.images.check_settings(config["dataset"])
    partitions.partition.check_settings(config["partition"], config["num_nodes"])
    partitions.participation.base.check_settings(config["participation"], config["num_nodes"])
    models.base.check_settings(config["model"])
    engine_config(config["engine"])
    if config["init_from"] is not None and not Path(config["init_from"]).is_file():
        raise UserError(f"init_from: there is no file {config['init_from']}")


def engine_config(settings: Mapping[str, Any]) -> Any:
    """Return the checked config of ``engine=NAME``."""
    module = registry.find("simulation", "engine", settings)
    return build(module.Config, settings, "engine", ignore=registry.COMMON_KEYS)
