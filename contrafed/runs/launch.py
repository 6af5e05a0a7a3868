"""Run a Hydra job: its folder, and the objective of a search."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from contrafed.config.compose import expand_jobs
from contrafed.config.run_config import Run
from contrafed.config.unused import warn_of_unused
from contrafed.core.errors import UserError, nearest, unknown
from contrafed.core.privacy import gaussian
from contrafed.runs.early_stopping import warn_of_test_data
from contrafed.runs.output.console import VALIDATED
from contrafed.runs.setup import names_folder

# Leading numbers of a summary, by the data that select. The objective is the first that exists.
LEADING_METRICS = {
    "validation": VALIDATED,
    "test": ("personal_accuracy_mean", "accuracy_final"),
}
TO_TARGET = ("target_accuracy", "rounds_to_target", "bytes_up_to_target", "bytes_down_to_target", "simulated_time_to_target")
# Other numbers that a summary can have.
OTHER_NUMBERS = (
    *("seed", "federation_seed", "num_clients", "num_rounds", "parameters", "rounds", "best_round", "probability_mean"),
    *("partition_small_clients", "partition_small_moved", "partition_small_dropped"),
    *("seconds", "seconds_per_round", "local_seconds_median", "aggregate_seconds_median"),
    *("bytes_up", "bytes_down", "replies_rejected", "failures", "simulated_time", "lost_seconds", "lost_steps"),
    *("bytes_up_per_client", "bytes_down_per_client", "bytes_up_by_formula", "bytes_down_by_formula"),
    *TO_TARGET,
    *("epsilon", "delta", "privacy_rounds"),
)
# Sweepers that run a grid. Others search, by the objective.
OWN_SWEEPER = "contrafed_sweeper"
GRID_SWEEPERS = (OWN_SWEEPER, "BasicSweeper")

_missing: list[Path] = []  # folders that Hydra is about to make, the innermost first
_kept: list[Path] = []  # the folder of a run that was there before


def find_folder(config: DictConfig) -> tuple[Path, bool]:
    """Return the folder of Hydra's job, and whether the user or the sweeper chose it."""
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        folder, here = Path(job.runtime.output_dir), Path.cwd()
        return folder.relative_to(here) if folder.is_relative_to(here) else folder, True
    named = names_folder(job.overrides.task) or any(str(line).startswith("hydra.run.dir=") for line in job.overrides.hydra)
    return Path(job.runtime.output_dir if job.job.chdir else config.output_dir), named


def print_other_jobs() -> None:
    """Print a line if the experiment of a single run has other jobs."""
    job = HydraConfig.get()
    if job.mode == RunMode.MULTIRUN:
        return
    own = next((source.path for source in job.runtime.config_sources if source.provider == "command-line"), None)
    if (several := len(expand_jobs([str(line) for line in job.overrides.task], own))) > 1:
        print(f"this is one of {several} jobs: this line with -m runs them all", flush=True)


def print_unused(run: Run) -> None:
    """Print a line for each key of a run's command line that has no effect. Our sweeper prints these for all its jobs."""
    job = HydraConfig.get()
    if job.mode != RunMode.MULTIRUN or OWN_SWEEPER not in str(job.sweeper.get("_target_")):
        print("".join(f"{line}\n" for line in warn_of_unused([(map(str, job.overrides.task), run)])), end="", flush=True)


def check_objective(run: Run) -> None:
    """Raise ``UserError`` before a run for an objective that no summary of its method has."""
    from contrafed.runs.output.series import list_accuracies
    from contrafed.training.workspace import client_class_of

    if run.objective is None:
        return
    known = (*OTHER_NUMBERS, *list_accuracies(client_class_of(run.client.strategy).model_names))
    if run.objective not in known:
        said = f"a run of strategy={run.client.strategy.name} has no number '{run.objective}'"
        wanted = "a number of summary.json, such as personal_accuracy_mean or accuracy_final"
        raise UserError(f"objective: {said}{nearest(run.objective, known) or '.'} Fix: {wanted}")
    if fix := _find_lacking(run).get(run.objective):
        raise UserError(f"objective: this run has no {run.objective}. Fix: {fix}, or another number")


def _find_lacking(run: Run) -> dict[str, str]:
    """Return the numbers that a summary has only with another setting than this run's, each with the setting."""
    found = dict[str, str]()
    if not isinstance(run.privacy.config, gaussian.Gaussian):
        found |= dict.fromkeys(("epsilon", "delta", "privacy_rounds"), "privacy=central")
    if run.target_accuracy is None:
        found |= dict.fromkeys(TO_TARGET, "target_accuracy=0.9")
    if run.clock.name == "none":
        names = ("simulated_time", "lost_seconds", "lost_steps", "simulated_time_to_target")
        found |= dict.fromkeys(names, "clock=lognormal")
    return found


def read_objective(summary: Mapping[str, Any], name: str | None) -> float | None:
    """Return the number of a summary that a search maximises.

    Raises:
        UserError: If it has none of this name, or if a search has none at all.
    """
    if name is None:
        leading = LEADING_METRICS[summary.get("select_on") or "test"]
        found = next((summary[key] for key in leading if summary.get(key) is not None), None)
    elif isinstance(found := summary.get(name), bool) or not isinstance(found, int | float):
        numbers = [key for key, value in summary.items() if isinstance(value, int | float) and not isinstance(value, bool)]
        raise unknown("objective", name, numbers)
    if found is None and _is_search():
        raise UserError(f"objective: nothing was evaluated. {summary.get('not_evaluated') or 'Fix: examples for testing'}")
    return None if found is None else float(found)


def warn_of_objective(summary: Mapping[str, Any], name: str | None) -> str:
    """Return the notice of a search whose objective is an accuracy on test data, empty for others."""
    on_test = summary.get("select_on") == "test" if name is None else "validation" not in name and "accuracy" in name
    return warn_of_test_data("objective") if _is_search() and on_test else ""


def _is_search() -> bool:
    """Return whether this process runs a job of a search."""
    if not HydraConfig.initialized():
        return False
    job = HydraConfig.get()
    return job.mode == RunMode.MULTIRUN and not any(name in str(job.sweeper.get("_target_")) for name in GRID_SWEEPERS)


def find_named_folder(overrides: Sequence[str]) -> Path | None:
    """Return the folder of a single run that a command line names by Hydra's key, None if it does not."""
    named = [line.partition("=")[2] for line in overrides if line.startswith("hydra.run.dir=")]
    return Path(named[-1]).expanduser() if named else None


def note_missing(folder: Path) -> None:
    """Store which parent folders of a run's folder do not exist, before Hydra makes them."""
    _missing[:] = [path for path in (folder, *folder.parents) if not path.exists()]
    _kept[:] = [] if _missing else [folder.resolve()]


def remove_empty(folder: Path) -> None:
    """Remove the empty folder of a run that did not begin, and its parents that did not exist before."""
    with contextlib.suppress(OSError):  # not empty
        for path in _missing if folder in _missing else [folder]:
            if path.resolve() not in _kept:
                path.rmdir()
