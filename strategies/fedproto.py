"""FedProto, the server half: prototypes alone."""

from dataclasses import dataclass
from typing import Any, Literal

from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    prototype_weights: Literal["plain", "class_count"]


class FedProto(FederatedStrategy):
    """C_j = mean of C_j^k over the nodes k that hold class j. Source: Tan et al. 2022, Algorithm 1 and Equation 6.

    Deviation: holders weigh equally by default, as in the common code; ``class_count`` weighs them by their examples of the
    class, as Equation 6 does, but for its further 1/|N_j|. A class that nobody held this round keeps its prototype.
    """

    averages = True

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """Prototypes are summed."""
        return ""

    def setup(self) -> None:
        """Start with an empty table."""
        self.prototypes = Prototypes(self.state, self.down)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the prototypes; no tensor of the model travels."""
        return self.prototypes.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average the prototypes; the server's model stays as it began and is used by nobody."""
        self.prototypes.merge(replies, self.config.prototype_weights)
        return model
