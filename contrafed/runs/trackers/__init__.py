"""Where a run's metrics go beside its CSV files, which stay the record: a file per service, chosen as ``tracker=NAME``."""

from collections.abc import Callable, Mapping
from typing import Any

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.tracker import Tracked, Tracker


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
