"""The plain mean: the rule's own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """No settings."""
