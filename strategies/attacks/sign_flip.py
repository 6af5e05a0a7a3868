"""Attackers send their change the other way round."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks, and how much."""

    factor: Annotated[float, Range(gt=0)]


class SignFlip(Attack):
    """Delta' = -factor Delta, prototypes likewise."""

    def one(self, change: Tensors, server_round: int, node: int) -> Tensors:
        """Return the opposite."""
        return {name: -self.config.factor * tensor for name, tensor in change.items()}
