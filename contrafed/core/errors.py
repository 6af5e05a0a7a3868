"""Exceptions that are reported in one line: a user's mistake, and a run that stopped itself."""

import difflib
import re
from collections.abc import Iterable

MIN_LIKENESS = 0.72  # of a suggestion: pmlf and pmfl have 0.75, fedfoo and fedproto 0.71
MAX_CHOICES = 10  # that an error lists after a suggestion


class UserError(Exception):
    """A mistake in what the user asked for, reported in one line.

    The command line prints it without a traceback and exits with status 2. ``contrafed.run`` raises it.
    ``key`` is the key, option, file or function that the line is about.
    """

    def __init__(self, line: str, key: str | None = None) -> None:
        """Build the error from its line.

        Args:
            line: The message.
            key: What it is about. By default the message begins with it.
        """
        super().__init__(line)
        self.key = key or _first_word(line)


class RunStopped(Exception):
    """A run that stopped itself, reported in one line.

    Everything up to then has been written. The exit status is 1. ``key`` is as in ``UserError``.
    """

    def __init__(self, line: str, status: str = "failed") -> None:
        """Build the error from its line.

        Args:
            line: The message.
            status: The status in the run's summary.
        """
        super().__init__(line)
        self.key, self.status = _first_word(line), status


class DiskError(RunStopped):
    """A disk that is full, read-only or broken. What was written before is kept."""


def unknown(kind: str, name: str, known: Iterable[str], listed_by: str = "") -> UserError:
    """Return the error for a name that does not exist.

    Args:
        kind: What the name is of.
        name: The name.
        known: All names that exist. More than a few are listed only if none is near.
        listed_by: A command that lists them, named instead.
    """
    names, more = sorted(known), ""
    near = nearest(name, names)
    if not near or len(names) <= MAX_CHOICES:
        more = f" choices: {', '.join(names) or 'none'}"
    elif listed_by:
        more = f" {listed_by} lists all"
    line = f"unknown {kind} '{name}'{near or ';'}{more}"
    group, _, last = kind.rpartition(" ")
    return UserError(line, f"{group}.{name}" if group and last == "key" else name if kind == "key" else kind)


def _first_word(line: str) -> str:
    """Return the word with which a message begins, after the number of a round."""
    found = re.match(r"(?:round \d+: )?([^\s:=,]*)", line)
    return found[1] if found else ""


def nearest(name: str, known: Iterable[str], cutoff: float = MIN_LIKENESS) -> str:
    """Return ``, did you mean 'NAME'?`` with the nearest existing name.

    The result is empty if no name is as near as ``cutoff``, a similarity from 0 to 1.
    """
    lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=cutoff)
    return f", did you mean '{lower[near[0]]}'?" if near else ""
