"""full: every node is available in every round."""

from dataclasses import dataclass

from contrafed.data.participation import Participation, Selection


@dataclass(frozen=True)
class Config(Selection):
    """No settings of its own."""


class Full(Participation):
    """Everyone, always."""
