"""Attackers multiply the length of their update."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """The attackers and the strength of the attack."""

    factor: Annotated[float, Range(gt=0)]


class Scale(Attack):
    """Replace an update by Delta' = factor Delta, prototypes likewise."""

    def one(self, change: Tensors, server_round: int, client: int) -> Tensors:
        """Return the longer update."""
        return {name: self.config.factor * tensor for name, tensor in change.items()}
