"""FedProto, the server half: prototypes alone (METHODS section 21)."""

from dataclasses import dataclass
from typing import Literal

from strategies.prototypes import PrototypeStrategy


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    prototype_weights: Literal["plain", "class_count"]


class FedProto(PrototypeStrategy):
    """Per class the mean of the holders' prototypes, equally weighted by default as in the common code. Tan et al. 2022."""

    def setup(self) -> None:
        """Start with an empty table, weighted as configured."""
        super().setup()
        self.weighting = self.config.prototype_weights
