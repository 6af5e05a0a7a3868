"""none: the CSV files alone."""

from dataclasses import dataclass

from contrafed.core.tracker import Tracker


@dataclass(frozen=True)
class Config:
    """Settings of the tracker: none."""


class NoTracker(Tracker):
    """Nothing."""
