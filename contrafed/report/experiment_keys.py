"""Find what an experiment sets for single methods, and what its ``settings`` set, in its section ``where``.

An experiment of the user's is read as the setting ``PAPER/base`` that it inherits, because its own file may not be here. What
it sets for a run's method is in the run's ``method_keys``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from contrafed.config.compose import make_own_loader
from contrafed.config.sweep_grid import Case, condition_holds, read_conditions
from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.report.runs import FinishedRun, flat


def find_method_keys(run: FinishedRun) -> set[str]:
    """Return the dotted keys that a run's experiment sets for its method, except those that its command line changed."""
    where = _read_where(_find_experiment(run))
    holding = (values for condition, values in where.items() if "strategy=" in condition and _holds(condition, run.config))
    return set[str](run.config.get("method_keys") or ()).union(*holding) - _read_changed_keys(run.config)


def spread_settings(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs, and those for which ``settings`` changes nothing under the other settings of their experiment too.

    A sweep over ``settings=printed,code`` runs such a job once. Other settings are those that other runs have.
    """
    known: dict[Any, dict[str, None]] = {}
    for run in runs:
        if run.config.get("settings") is not None:
            known.setdefault(run.config.get("experiment"), {})[str(run.config["settings"])] = None
    if all(len(several) < 2 for several in known.values()):
        return list(runs)
    there, found = {_identify(run) for run in runs}, list(runs)
    for run in runs:
        for name in known.get(run.config.get("experiment"), ()) if run.config.get("settings") is not None else ():
            other = replace(run, config={**run.config, "settings": name})
            if (identity := _identify(other)) not in there and not _has_settings(run):
                there.add(identity)
                found.append(other)
    return found


def _identify(run: FinishedRun) -> str:
    said = flat(run.config) | {key: run.config.get(key) for key in ("seed", "published", "scale")}
    return json.dumps(said, sort_keys=True, default=str)


def _has_settings(run: FinishedRun) -> bool:
    """Return whether ``settings`` of a run's experiment sets any of its keys. So it is for an unknown experiment."""
    if (experiment := _find_experiment(run)) is None:
        return True
    keys = set[str]()
    for condition, values in _read_where(experiment).items():
        rest = " ".join(part for part in condition.split() if not part.startswith("settings="))
        if rest != condition and _holds(rest, run.config):
            keys |= values.keys()
    return bool(keys - _read_changed_keys(run.config))


def _read_changed_keys(config: Mapping[str, Any]) -> set[str]:
    return {str(line).lstrip("+").partition("=")[0] for line in config.get("changed") or ()}


def _holds(condition: str, config: Mapping[str, Any]) -> bool:
    try:
        return condition_holds(condition, config)
    except UserError:  # of a key that the run is older than
        return False


def _find_experiment(run: FinishedRun) -> str | None:
    """Return a run's experiment if it is one of Contrafed's, else the setting of its paper, None without either."""
    shipped = registry.choices("experiment")
    for name in (run.config.get("experiment"), f"{run.published_values.get('paper')}/base"):
        if name in shipped:
            return str(name)
    return None


@lru_cache
def _read_where(experiment: str | None) -> dict[str, Case]:
    if experiment is None:
        return {}
    return read_conditions(make_own_loader().compose_choices((f"experiment={experiment}",)).get("where"))
