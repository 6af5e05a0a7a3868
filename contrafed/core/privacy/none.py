"""none: no clipping and no noise."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
