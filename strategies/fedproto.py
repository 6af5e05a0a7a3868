"""FedProto's strategy: average prototypes alone."""

from dataclasses import dataclass
from typing import Any, Literal

from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    prototype_weights: Literal["plain", "class_count"]


class FedProto(FederatedStrategy):
    """Average the prototypes of each class: C_j = mean of C_j^k over the clients k that hold class j.

    Source: Tan et al. 2022, Algorithm 1 and Equation 6.

    Deviation: holders have equal weights by default, as in the common code. With ``class_count`` the weights are their examples
    of the class, as in Equation 6, but without its further factor 1/|N_j|. A class without a holder in this round keeps its
    prototype.
    """

    linear_in_updates = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return an empty reason: prototypes are summed."""
        return ""

    def setup(self) -> None:
        """Start with an empty table of prototypes."""
        self.prototypes = Prototypes(self.state, self.broadcast_spec)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the prototypes, without any tensor of the model."""
        return self.prototypes.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average the prototypes, and return the unused model unchanged."""
        self.prototypes.merge(replies, self.config.prototype_weights)
        return model
