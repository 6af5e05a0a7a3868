"""No attack."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
