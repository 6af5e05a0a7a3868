"""FedCRL and FedCoSR, the server half: the mean of the bodies, and of the prototypes by class count (METHODS section 1)."""

from dataclasses import dataclass

from strategies.base import Replies, Tensors
from strategies.prototypes import PrototypeStrategy


@dataclass(frozen=True)
class Config:
    """No hyper-parameters: everything that can be chosen is in the node half."""


class FedCRL(PrototypeStrategy):
    """phi = sum_k (n_k / n) phi_k (Equation 5); Omega_c = sum_k (n_kc / n_c) omega_kc over the holders of c (Equation 6)."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average bodies by training examples, and merge the prototypes."""
        self.merge_prototypes(replies)
        return model | replies.mean("model", replies.num_examples) if len(replies) else model
