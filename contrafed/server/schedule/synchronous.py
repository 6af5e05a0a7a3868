"""synchronous: a round asks its cohort, waits for all of it, and aggregates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
