"""A job of Hydra's: its run in the folder that Hydra names, and the objective that a search looks at."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from contrafed.core.errors import UserError, unknown
from contrafed.runs.output import print_summary
from contrafed.runs.output.folder import held
from contrafed.runs.run import run_resolved
from contrafed.runs.setup import check_latest, checked

# What a summary leads with, the first that it has.
LEADING = ("personal_accuracy_mean", "accuracy_final")


def run_in_folder(config: DictConfig, folder: Path, *, named: bool, unique: bool) -> float | None:
    """Run a composed configuration in ``folder`` and return its objective, None if the run has no such number.

    ``named``: the folder is the user's choice, in which a run can resume. ``unique``: a folder that has a run already gets a
    number. Raises ``UserError`` and ``RunStopped``.
    """
    config.output_dir = str(folder)
    try:
        wanted = checked(config)
        check_latest(wanted, named)
        with held(folder) as free:
            if not free and not unique:
                raise UserError(f"output_dir: another process writes in {folder}")
            summary = run_resolved(wanted, unique=unique)
    finally:
        remove_empty(folder, named)
    print_summary(summary, summary["folder"])
    return read_objective(summary, config.objective)


def read_objective(summary: Mapping[str, Any], name: str | None) -> float | None:
    """Return the number of a summary that a search maximises. Raises ``UserError`` if it has none of this name."""
    if name is None:
        found = next((summary[key] for key in LEADING if summary.get(key) is not None), None)
    elif isinstance(found := summary.get(name), bool) or not isinstance(found, int | float):
        numbers = [key for key, value in summary.items() if isinstance(value, int | float) and not isinstance(value, bool)]
        raise unknown("objective", name, numbers)
    return None if found is None else float(found)


def remove_empty(folder: Path, named: bool) -> None:
    """Remove a folder that Hydra made for a run that did not begin, and the dated ones that it is in unless it is ``named``."""
    with contextlib.suppress(OSError):  # not empty
        for path in (folder,) if named else (folder, folder.parent, folder.parent.parent):
            path.rmdir()
