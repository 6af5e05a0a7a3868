"""none: nothing is clipped and no noise is added."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
