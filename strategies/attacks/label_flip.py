"""Attackers train on wrong labels and otherwise do as honest clients (``contrafed/data/label_flip.py``)."""

from dataclasses import dataclass
from typing import ClassVar

from contrafed.engines.attack import Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """The attackers."""

    flips_labels: ClassVar[bool] = True
