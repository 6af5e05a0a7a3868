"""Attackers train on wrong labels; everything else is as honest nodes do it (``contrafed/data/label_flip.py``)."""

from dataclasses import dataclass
from typing import ClassVar

from contrafed.engines.attack import Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks."""

    flips_labels: ClassVar[bool] = True
