"""FedCRL and FedCoSR, the server half: the mean of the bodies, and of the prototypes by class count (METHODS section 1)."""

from dataclasses import dataclass

from strategies.prototypes import PrototypeStrategy


@dataclass(frozen=True)
class Config:
    """No hyper-parameters: everything that can be chosen is in the node half."""


class FedCRL(PrototypeStrategy):
    """phi = sum_k (n_k / n) phi_k (Equation 5); Omega_c = sum_k (n_kc / n_c) omega_kc over the holders of c (Equation 6)."""
