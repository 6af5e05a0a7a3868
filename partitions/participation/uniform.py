"""uniform: all clients are available, and the server selects a fixed number or fraction, without replacement."""

from dataclasses import dataclass

from contrafed.data.participation import Participation, Selection


@dataclass(frozen=True)
class Config(Selection):
    """No settings. The number of selected clients is the server's ``select``."""


class Uniform(Participation):
    """All clients are available, and ``select`` sets the cohort's size."""
