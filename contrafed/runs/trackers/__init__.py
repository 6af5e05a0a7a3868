"""Send a run's metrics to services in addition to its CSV files. Each service has a file, chosen as ``tracker=NAME``."""

from collections.abc import Callable, Mapping
from typing import Any

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.tracker import Tracked, Tracker


class Followed:
    """A tracker whose failures end no run. After its first failure, which is reported, it is not used any more."""

    def __init__(self, tracker: Choice, run: Tracked) -> None:
        """Start the tracker. Raises ``UserError`` before the first round if it cannot start."""
        self.name = tracker.name
        try:
            self.tracker: Tracker | None = registry.only_subclass(tracker.module, Tracker)(tracker.config, run)
            self.line = self.tracker.line
        except Exception as error:
            raise UserError(f"tracker={self.name} cannot begin: {_words(error)}") from error

    def log(self, server_round: int, values: Mapping[str, float], say: Callable[[str], None]) -> None:
        """Pass on a round's metrics. ``say`` prints the line about a failure."""
        self._call("log", server_round, values, say=say)

    def close(self, status: str) -> None:
        """End the tracker, and report a failure."""
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
