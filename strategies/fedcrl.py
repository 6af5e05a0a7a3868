"""FedCRL's and FedCoSR's strategy: the mean of the bodies, and of the prototypes by class count."""

from dataclasses import dataclass
from typing import Any

from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """No hyper-parameters: all choices are the client's."""


class FedCRL(FederatedStrategy):
    """Average the participants' bodies by examples and their prototypes by class counts.

    Bodies: phi = sum_k (n_k / n) phi_k (Equation 5). Prototypes: Omega_c = sum_k (n_kc / n_c) omega_kc over the holders of c
    (Equation 6).

    Source: Huang et al. 2024 (FedCRL, arXiv:2404.17916v1). FedCoSR is its journal version (arXiv:2404.17916).

    Deviation: a class without a holder in this round keeps its prototype.
    """

    linear_in_updates = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return an empty reason: bodies and prototypes are summed."""
        return ""

    def setup(self) -> None:
        """Start with an empty table of prototypes."""
        self.prototypes = Prototypes(self.state, self.broadcast_spec)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return phi and Omega."""
        return super().broadcast(model) | self.prototypes.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average the prototypes and the bodies."""
        self.prototypes.merge(replies, "class_count")  # Equation 6
        return replies.mean("model", replies.num_examples)  # Equation 5
