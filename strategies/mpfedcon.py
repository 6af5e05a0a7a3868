"""MpFedcon, the server half: the mean of the base encoders, and of the class centres (METHODS section 3)."""

from dataclasses import dataclass
from typing import Literal

from strategies.prototypes import PrototypeStrategy


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    centre_weights: Literal["class_count", "plain", "data"]


class MpFedcon(PrototypeStrategy):
    """theta = sum_k (n_k / n) theta_k (Algorithm 1, line 29); centres per class over their holders.

    ``class_count`` (default) is the exact pooled mean, ``plain`` Equation 4, ``data`` Algorithm 1 line 30 without its extra
    1/n, which would shrink every centre. Deviation: a class nobody held this round keeps its centre.
    """

    def setup(self) -> None:
        """Start with an empty table, weighted as configured."""
        super().setup()
        self.weighting = self.config.centre_weights
