"""uniform: everyone is available, and the server takes a fixed number or fraction, without replacement."""

from dataclasses import dataclass

from contrafed.data.participation import Participation, Selection


@dataclass(frozen=True)
class Config(Selection):
    """No settings of its own; how many is the server's ``select``."""


class Uniform(Participation):
    """Everyone is available; ``select`` does the rest."""
