"""The plain mean of the strategy itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
