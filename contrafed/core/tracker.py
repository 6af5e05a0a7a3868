"""Define the base class of trackers, and the run that one follows. The trackers are in ``contrafed/runs/trackers``."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker follows."""

    folder: Path
    composed: Mapping[str, Any]  # its configuration
    resumed: bool  # whether it resumes, so that an earlier attempt may have left its name


class Tracker:
    """Receives a run's metrics after each round."""

    package: ClassVar[str] = ""  # the optional Python package that it needs, "" for none

    def __init__(self, config: Any, run: Tracked) -> None:
        """Begin or resume the run. May raise anything."""

    @property
    def line(self) -> str:
        """The command that shows what was tracked, "" for none."""
        return ""

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Record a round's metrics, named SCOPE/SPLIT/METRIC as the columns of ``metrics.csv``. May raise anything."""

    def close(self, status: str) -> None:
        """End with the run's status: finished, interrupted, diverged or failed. May raise anything."""


def check_tracker(tracker: Choice) -> None:
    """Raise ``UserError`` if the package that a tracker needs is not installed."""
    package = registry.only_subclass(tracker.module, Tracker).package
    if package and importlib.util.find_spec(package) is None:
        raise UserError(f"tracker={tracker.name} needs the Python package '{package}'. Fix: pip install {package}")
