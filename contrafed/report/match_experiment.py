"""Runs in the place of another experiment's: a cell that two tables of a paper share is run once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from contrafed.config.checks import find_own_folder
from contrafed.config.compose import compose_job, expand_jobs, read_grid, to_plain
from contrafed.core import registry
from contrafed.core.errors import UserError, unknown
from contrafed.report.runs import FinishedRun, flat
from contrafed.runs.output.console import counted


def placed(runs: Sequence[FinishedRun], experiment: str, config_dir: Path | None = None) -> list[FinishedRun]:
    """Return the runs that are jobs of an experiment's grid by their settings, each with what it stands beside there.

    A job is composed as the run was: at its ``scale`` and with what it ``changed``. A run that is several jobs is each.
    ``config_dir`` is the folder of YAMLs that the experiment or the methods are from, where they are the user's own.
    Raises ``UserError`` for an experiment that there is not, and where no run is one of its jobs.
    """
    own = find_own_folder(config_dir)
    if experiment not in (known := registry.choices("experiment", own)):
        raise unknown("experiment", experiment, known)
    found = []
    for run in runs:
        changed = tuple(str(line) for line in run.config.get("changed") or ())
        jobs = _jobs(experiment, str(run.config["strategy"]["name"]), run.config.get("scale"), changed, own)
        found += [replace(run, config={**run.config, **origin}) for origin in jobs.get(_setting(run.config), [])]
    if not found:
        raise UserError(f"none of {counted(len(runs), 'run')} is a job of experiment={experiment}")
    return found


@lru_cache
def _jobs(
    experiment: str, strategy: str, scale: str | None, changed: tuple[str, ...], own: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Return a method's jobs of a grid: setting -> what each of them says of where it comes from."""
    found: dict[str, list[dict[str, Any]]] = {}
    axes = [f"strategy={strategy}"] if "strategy" in read_grid(experiment, own) else []
    for job in expand_jobs(
        [f"experiment={experiment}", "seed=0", *axes, *([f"scale={scale}"] if scale else []), *changed], own
    ):
        try:
            config = to_plain(compose_job(job.overrides, own))
        except UserError:  # a method of somebody's own, or a key that this table's choices do not have
            continue
        found.setdefault(_setting(config), []).append({key: config.get(key) for key in ("experiment", "published", "changed")})
    return found


def _setting(config: Any) -> str:
    """Return what decides a run's numbers, but for its seed."""
    return json.dumps({key: value for key, value in flat(config).items() if value is not None}, sort_keys=True, default=str)
