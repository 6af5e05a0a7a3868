"""Compose a job's configuration, and list the jobs of a sweep."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from contrafed.config import sweep_grid
from contrafed.config.checks import GROUPS, find_own_folder
from contrafed.config.loader import ConfigLoader, make_loader, stamp, to_plain
from contrafed.config.overrides import hydra_key, list_values, parse_overrides, rename_arguments
from contrafed.core import registry
from contrafed.core.disk import shorten_name
from contrafed.core.errors import UserError

__all__ = ["Job", "compose_job", "composition", "expand_jobs", "find_choices", "make_own_loader", "read_grid", "to_plain"]


def make_own_loader(config_dir: str | Path | None = None) -> ConfigLoader:
    """Return a loader that also searches the user's folder of YAMLs. Raises ``UserError`` for an unsuitable folder."""
    own = find_own_folder(config_dir)
    return _make_loader(own, stamp(own))


@lru_cache(maxsize=16)
def _make_loader(own: Path | None, files: object) -> ConfigLoader:
    return make_loader(own)


def compose_job(overrides: list[str], config_dir: str | Path | None = None) -> DictConfig:
    """Compose one job's configuration from YAMLs alone. Raises ``UserError`` for an unknown choice or key, and for a
    shard, which only a sweep has.
    """
    lines = rename_arguments(overrides)
    if (shard := next((line for line in lines if line.lstrip("+").startswith(f"{hydra_key('shard')}=")), None)) is not None:
        raise UserError(f"shard={shard.partition('=')[2]}: a single run is not divided. Fix: add -m, or leave shard out")
    return make_own_loader(config_dir).compose_job(lines)


def read_grid(experiment: str, config_dir: str | Path | None = None) -> sweep_grid.SweepGrid:
    """Return the grid in an experiment's file, empty if it has none. Raises ``UserError``."""
    return make_own_loader(config_dir).read_grid(experiment)


def find_choices(override: str, config_dir: str | Path | None = None) -> dict[str, str]:
    """Return group -> choice after one override, such as ``strategy=moon``, with ``strategy/server`` if the method has one."""
    return make_own_loader(config_dir).find_choices((override,))


def composition(strategy: Mapping[str, Any]) -> str:
    """Return a method's name, with + and the strategy if that is not its own: fedrcl+fedadam."""
    name, server = str(strategy["name"]), strategy.get("server")
    return name if server is None or server == _own_server(name) else f"{name}+{server}"


@lru_cache
def _own_server(name: str) -> str | None:
    """Return a method's own strategy, None if it has none to replace. For a user's method it is the plainest one."""
    if name not in registry.choices("strategy"):
        return "fedavg"
    return find_choices(f"strategy={name}").get("strategy/server")


@dataclass(frozen=True)
class Job:
    """One job of a sweep."""

    number: int  # from 0 over the whole sweep
    overrides: list[str]  # command line of this job alone
    name: str  # the values that vary
    experiment: str | None
    scale: str | None


def expand_jobs(overrides: list[str], config_dir: str | Path | None = None, loader: ConfigLoader | None = None) -> list[Job]:
    """Return every job of a sweep: first the axes of an experiment's grid, then those of the command line.

    An override of an axis replaces its values. An override of a choice that named cases make selects among these cases. Any
    other override with several values is one more axis. Raises ``UserError``.
    """
    loader = loader or make_own_loader(config_dir)
    asked = {o.key_or_group: list_values(o) for o in parse_overrides(rename_arguments(overrides), loader)}
    asked.pop(hydra_key("shard"), None)  # of the sweep, and no job's
    jobs: list[Job] = []
    for chosen in asked.pop("experiment", {"": ""}).values():
        experiment = None if chosen in ("", "experiment=null") else chosen.partition("=")[2]
        axes, used, bare = dict[str, list[str]](), set[str](), set(GROUPS)
        if experiment is not None:
            table = {hydra_key(name): axis for name, axis in loader.read_grid(experiment).items()}
            default = loader.find_choices((f"experiment={experiment}",))
            axes, used = sweep_grid.select_axes(table, {key: list(values) for key, values in asked.items()}, GROUPS, default)
            bare |= {name for name, axis in table.items() if isinstance(axis, dict)}
        columns = {key: {value: f"{key}={value}" for value in values} for key, values in axes.items()}
        columns |= {key: values for key, values in asked.items() if key not in used}
        varied = [key for key, values in columns.items() if key in axes or len(values) > 1]
        for row in itertools.product(*columns.values()):
            values = dict(zip(columns, row, strict=True))
            lines = [columns[key][value] for key, value in values.items()]
            name = shorten_name("-".join(_name_value(key, values[key], key in bare) for key in varied) or "run")
            scale = values.get("scale")
            scale = None if scale in (None, "null") else str(scale)
            jobs.append(Job(len(jobs), [chosen, *lines] if chosen else lines, name, experiment, scale))
    return jobs


def _name_value(key: str, value: str, bare: bool) -> str:
    """Return an axis's part of a job's name: a choice or a case alone, another value after its key's last word."""
    word = re.sub(r"[^\w.+-]+", "_", value).strip("_")
    return word if bare else f"{re.split('[./]', key)[-1]}={word}"


def take_shard(jobs: list[Any], shard: str | None) -> list[Any]:
    """Return every Nth job from the Ith for ``shard`` I/N, all for None. Raises ``UserError`` for another form."""
    if shard is None:
        return jobs
    found = re.fullmatch(r"(\d+)/(\d+)", shard)
    first, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= first <= count:
        raise UserError(f"shard={shard} must be I/N with I from 1 to N, such as shard=2/4")
    if not (chosen := jobs[first - 1 :: count]):
        raise UserError(f"shard={shard}: the sweep has only {len(jobs)} jobs")
    return chosen
