"""full: every client is available in every round."""

from dataclasses import dataclass

from contrafed.data.participation import Participation, Selection


@dataclass(frozen=True)
class Config(Selection):
    """No settings."""


class Full(Participation):
    """All clients are always available."""
