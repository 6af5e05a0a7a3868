"""MpFedcon, the server half: the mean of the base encoders, and of the class centres (METHODS section 3)."""

from dataclasses import dataclass
from typing import Literal

from strategies.base import FederatedStrategy, Replies, Tensors
from strategies.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    centre_weights: Literal["class_count", "plain", "data"]


class MpFedcon(FederatedStrategy):
    """theta = sum_k (n_k / n) theta_k (Algorithm 1, line 29); centres per class over their holders (line 30).

    ``class_count`` (default) is the exact pooled mean, ``plain`` Equation 4, ``data`` line 30 without its extra 1/n, which
    would shrink every centre. Deviation: a class nobody held this round keeps its centre.
    """

    def setup(self) -> None:
        """Start with an empty table; a class centre is a prototype."""
        self.centres = Prototypes(self.state, self.down)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the base encoder and the centres."""
        return super().broadcast(model) | self.centres.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average encoders (line 29) and centres (line 30); nothing changes in a round without replies."""
        if not len(replies):
            return model
        self.centres.merge(replies, self.config.centre_weights)
        return replies.mean("model", replies.num_examples)
