"""Runs in the place of another experiment's: a cell that two tables of a paper share is run once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from contrafed.analysis.runs import FinishedRun, flat
from contrafed.composition import compose_yaml, grid_of, plain, use_plain_sgd
from contrafed.sweep import expand
from core import registry
from core.errors import UserError, unknown


def placed(runs: Sequence[FinishedRun], experiment: str) -> list[FinishedRun]:
    """Return the runs that are jobs of an experiment's grid by their settings, each with what it stands beside there.

    A job is composed as the run was: at its ``scale`` and with what it ``changed``. A run that is several jobs is each.
    Raises ``UserError`` for an experiment that there is not, and where no run is one of its jobs.
    """
    if experiment not in (known := registry.choices("experiment")):
        raise unknown("experiment", experiment, known)
    found = []
    for run in runs:
        changed = tuple(str(line) for line in run.config.get("changed") or ())
        jobs = _jobs(experiment, str(run.config["strategy"]["name"]), run.config.get("scale"), changed)
        found += [replace(run, config={**run.config, **origin}) for origin in jobs.get(_setting(run.config), [])]
    if not found:
        raise UserError(f"none of the {len(runs)} runs is a job of experiment={experiment}")
    return found


@lru_cache
def _jobs(experiment: str, strategy: str, scale: str | None, changed: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return a method's jobs of a grid: setting -> what each of them says of where it comes from."""
    found: dict[str, list[dict[str, Any]]] = {}
    axes = [f"strategy={strategy}"] if "strategy" in grid_of(experiment) else []
    for job in expand([f"experiment={experiment}", "seed=0", *axes, *([f"scale={scale}"] if scale else []), *changed]):
        try:
            composed = compose_yaml(job.overrides)
        except UserError:  # a method of somebody's own, or a key that this table's choices do not have
            continue
        use_plain_sgd(composed)
        config = plain(composed.config)
        found.setdefault(_setting(config), []).append({key: config.get(key) for key in ("experiment", "published", "changed")})
    return found


def _setting(config: Any) -> str:
    """Return what decides a run's numbers, but for its seed."""
    return json.dumps({key: value for key, value in flat(config).items() if value is not None}, sort_keys=True, default=str)
