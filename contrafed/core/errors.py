"""The exceptions that are said in one line: a user's mistake, and a run that ended itself."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user asked for, said in one line.

    The command line prints it without a traceback and exits with status 2; ``contrafed.run`` raises it.
    """


class RunStopped(Exception):
    """A run that ended itself, said in one line. What there is has been written; the exit status is 1."""

    def __init__(self, line: str, status: str = "failed") -> None:
        """``status``: what the run's summary says."""
        super().__init__(line)
        self.status = status


class DiskError(RunStopped):
    """A disk that is full, read-only or broken: what it still took has been written."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that does not exist: what was wrong, the nearest name, and the names that exist."""
    names = sorted(known)
    return UserError(f"unknown {kind} '{name}'{nearest(name, names) or ';'} choices: {', '.join(names) or 'none'}")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``, did you mean 'NAME'?`` with the nearest name that exists; nothing where none is as near as ``cutoff``."""
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=cutoff)
    return f", did you mean '{lower[near[0]]}'?" if near else ""
