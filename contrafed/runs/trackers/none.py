"""none: only the CSV files."""

from dataclasses import dataclass

from contrafed.core.tracker import Tracker


@dataclass(frozen=True)
class Config:
    """Settings of the tracker: none."""


class NoTracker(Tracker):
    """Does nothing."""
