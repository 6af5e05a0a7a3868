"""What Hydra does for a command line: reads overrides and composes the YAMLs of what they choose."""

import pickle
from functools import lru_cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig

from contrafed import grid
from core import registry
from core.errors import UserError


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


def first_line(error: Exception) -> str:
    """Return an error's text on one line, without a link."""
    return " ".join(str(error).split("See https://")[0].split())[:300]
