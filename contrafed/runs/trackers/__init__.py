"""Where a run's metrics go beside its CSV files, which stay the record: a file per service, chosen as ``tracker=NAME``."""

import importlib.util
from collections.abc import Callable, Mapping
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
    resumed: bool  # whether it goes on, so that an earlier sitting may have left its name


class Tracker:
    """Takes a run's metrics round by round."""

    package: ClassVar[str] = ""  # the optional Python package that it needs, "" for none

    def __init__(self, config: Any, run: Tracked) -> None:
        """Begin, or go on with, the run. May raise anything."""

    @property
    def line(self) -> str:
        """The command by which what is tracked can be looked at, "" for none."""
        return ""

    def log(self, server_round: int, values: Mapping[str, float]) -> None:
        """Take a round's metrics, named SCOPE/SPLIT/METRIC as the columns of ``metrics.csv``. May raise anything."""

    def close(self, status: str) -> None:
        """End with the run's status: finished, interrupted, diverged or failed. May raise anything."""


def check(tracker: Choice) -> None:
    """Raise ``UserError`` where the package that a tracker needs is not installed."""
    package = registry.only_subclass(tracker.module, Tracker).package
    if package and importlib.util.find_spec(package) is None:
        extra = f"pip install 'contrafed[{tracker.name}]', or pip install {package}"
        raise UserError(f"tracker={tracker.name} needs the Python package '{package}': {extra}")


class Followed:
    """A tracker whose failures cost no run: it is left alone after the first, which is told."""

    def __init__(self, tracker: Choice, run: Tracked) -> None:
        """Raises ``UserError`` where the tracker cannot even begin, before a round was run."""
        self.name = tracker.name
        try:
            self.tracker: Tracker | None = registry.only_subclass(tracker.module, Tracker)(tracker.config, run)
            self.line = self.tracker.line
        except Exception as error:
            raise UserError(f"tracker={self.name} cannot begin: {_words(error)}") from error

    def log(self, server_round: int, values: Mapping[str, float], say: Callable[[str], None]) -> None:
        """Pass a round's metrics on; ``say`` takes the line about a failure."""
        self._call("log", server_round, values, say=say)

    def close(self, status: str) -> None:
        """End, whatever happens."""
        self._call("close", status, say=print)

    def _call(self, method: str, *arguments: Any, say: Callable[[str], None]) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments)
        except Exception as error:
            self.tracker = None
            say(f"tracker={self.name} failed and is left alone, metrics.csv has everything: {_words(error)}")


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
