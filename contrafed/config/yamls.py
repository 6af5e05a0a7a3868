"""What Hydra does for a command line: reads overrides and composes the YAMLs of what they choose."""

import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.config import grid
from contrafed.core import registry
from contrafed.core.errors import UserError, nearest


def parse(overrides: list[str]) -> list[Override]:
    """Return overrides as Hydra reads them. Raises ``UserError``."""
    return [_parsed(override) for override in overrides]


def _parsed(override: str) -> Override:
    key, _, value = override.partition("=")
    # Of paths Hydra's grammar takes ~, = and spaces for its own.
    plainly = [f"{key}={grid.text(value)}"] if value and not set(value) & set("[]{}'\",\\") else []
    for line in (override, *plainly):
        try:
            return OverridesParser.create().parse_override(line)
        except HydraException as error:
            wrong = error
    if value.endswith(","):
        raise UserError(f"{override} ends with a comma: leave it out, or write the value that is missing after it")
    raise UserError(f"cannot read '{override}', which must be KEY=VALUE such as strategy=pmfl: {first_line(wrong)}")


def composed(overrides: list[str], own: Path | None, *, return_hydra_config: bool = False) -> DictConfig:
    """Return what Hydra composes of overrides, with the user's ``own`` YAMLs, a copy to each caller; raises Hydra's errors."""
    return pickle.loads(_pickled(tuple(overrides), own, stamp(own), return_hydra_config))  # type: ignore[no-any-return]


def stamp(own: Path | None) -> tuple[tuple[str, int], ...]:
    """Return what tells whether a file of a folder of YAMLs has changed."""
    return () if own is None else tuple((str(path), path.stat().st_mtime_ns) for path in registry.yamls(own))


# The jobs of a grid share most of their choices: 60 ms of Hydra's for each combination, 1 ms for its copy.
@lru_cache(maxsize=512)
def _pickled(overrides: tuple[str, ...], own: Path | None, files: object, return_hydra_config: bool) -> bytes:
    GlobalHydra.instance().clear()
    quoted = "" if own is None else str(own).replace("\\", "\\\\").replace("'", "\\'")
    path = [] if own is None else [f"hydra.searchpath=['file://{quoted}']"]
    with initialize_config_dir(version_base="1.3", config_dir=str(registry.CONF)):
        return pickle.dumps(compose("config", overrides=[*path, *overrides], return_hydra_config=return_hydra_config))


def choices_of(experiment: str, own: Path | None) -> dict[str, str]:
    """Return group -> the choice that an experiment makes itself, of each group."""
    chosen = composed([f"experiment={experiment}"], own, return_hydra_config=True)
    return {str(group): str(choice) for group, choice in chosen.hydra.runtime.choices.items()}


def rule_of(strategy: str, own: Path | None, above: tuple[str, ...] = ()) -> str | None:
    """Return the server rule among the defaults of a method's YAML, which ``strategy.server`` replaces; None without one.

    Or of one that it inherits, but for those ``above`` that inherit it. A YAML that cannot be read has none.
    """
    folders = [folder / "strategy" for folder in (own, registry.CONF) if folder is not None]
    file = next((folder / f"{strategy}.yaml" for folder in folders if (folder / f"{strategy}.yaml").is_file()), None)
    try:
        content: Any = {} if file is None or strategy in above else OmegaConf.to_container(OmegaConf.load(file))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    defaults = content.get("defaults") if isinstance(content, dict) else None
    items = defaults if isinstance(defaults, list) else []
    for key, rule in (pair for item in items if isinstance(item, dict) for pair in item.items()):
        if str(key).rpartition(" ")[2].removeprefix("/strategy/") == "server":
            return str(rule)
    inherited = (rule_of(item.removeprefix("/strategy/"), own, (*above, strategy)) for item in items if isinstance(item, str))
    return next((rule for rule in inherited if rule is not None), None)


def first_line(error: Exception) -> str:
    """Return an error's text on one line, without a link; of a YAML that is not there, with the nearest that is."""
    text = str(error).split("See https://")[0]
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        folder, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        there = [*(error.options or ()), *(path.stem for path in registry.yamls(registry.CONF / folder, deep=False))]
        text = text.split("\n")[0].rstrip(".") + nearest(name, there)
    return " ".join(text.split())[:300]
