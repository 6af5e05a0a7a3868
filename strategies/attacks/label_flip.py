"""Attackers train on wrong labels; everything else is as honest nodes do it (``partitions/flipped.py``)."""

from dataclasses import dataclass

from contrafed.engines.attack import Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks."""
