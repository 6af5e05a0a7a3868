"""none: no simulated time."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
