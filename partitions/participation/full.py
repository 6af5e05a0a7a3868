"""full: every node is available in every round."""

from dataclasses import dataclass

from partitions.participation.base import Participation


@dataclass(frozen=True)
class Config:
    """No settings of its own."""


class Full(Participation):
    """Everyone, always."""
