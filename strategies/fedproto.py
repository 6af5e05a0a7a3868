"""FedProto, the server half: prototypes alone (METHODS section 21)."""

from dataclasses import dataclass
from typing import Literal

from strategies.base import Replies, Tensors
from strategies.prototypes import PrototypeStrategy


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    prototype_weights: Literal["plain", "class_count"]


class FedProto(PrototypeStrategy):
    """Per class the mean of the holders' prototypes, equally weighted by default as in the common code. Tan et al. 2022."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Merge the prototypes; no model travels."""
        self.weighting = self.config.prototype_weights
        self.merge_prototypes(replies)
        return model
