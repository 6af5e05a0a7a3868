"""Use runs for another experiment: a cell that two tables of a paper share is run once."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from contrafed.config.checks import find_own_folder
from contrafed.config.compose import compose_job, expand_jobs, read_grid, to_plain
from contrafed.config.run_config import LABELS
from contrafed.core import registry
from contrafed.core.errors import UserError, unknown
from contrafed.report.runs import FinishedRun, flat
from contrafed.runs.output.console import format_count


def match_runs(runs: Sequence[FinishedRun], experiment: str, config_dir: Path | None = None) -> list[FinishedRun]:
    """Return the runs whose settings are those of jobs of an experiment, each with the published values of its job.

    A job is composed like the run, with its ``scale`` and its ``changed`` keys, under each of the experiment's ``settings``. A
    run that is several jobs is returned for each.

    Args:
        runs: The runs.
        experiment: The experiment.
        config_dir: The user's folder of YAMLs, if the experiment or methods are from it.

    Raises:
        UserError: For an unknown experiment, or if no run is one of its jobs.
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
        raise UserError(f"none of {format_count(len(runs), 'run')} is a job of experiment={experiment}")
    return found


@lru_cache
def _jobs(
    experiment: str, strategy: str, scale: str | None, changed: tuple[str, ...], own: Path | None
) -> dict[str, list[dict[str, Any]]]:
    """Return a method's jobs of a grid: setting -> the origin of each job."""
    found: dict[str, list[dict[str, Any]]] = {}
    axes = [f"strategy={strategy}"] if "strategy" in read_grid(experiment, own) else []
    asked = [f"experiment={experiment}", "seed=0", *axes, *([f"scale={scale}"] if scale else []), *changed]
    for job, settings in product(expand_jobs(asked, own), ([], ["settings=code"], ["settings=printed"])):
        try:
            config = to_plain(compose_job([*job.overrides, *settings], own))
        except UserError:  # a user's method, a key that this table's choices do not have, or no such settings
            continue
        if not settings and config.get("settings") is not None:  # the next two compose it
            continue
        origins, origin = found.setdefault(_setting(config), []), {key: config.get(key) for key in LABELS}
        if origin not in origins:  # a job that both settings share
            origins.append(origin)
    return found


def _setting(config: Any) -> str:
    """Return all that changes a run's numbers, except its seed. ``settings`` does so by other keys alone."""
    kept = {key: value for key, value in flat(config).items() if value is not None and key != "settings"}
    return json.dumps(kept, sort_keys=True, default=str)
