"""FedAS's strategy: average bodies by the clients' Fisher information."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """The strategy has no hyper-parameters."""


class FedAS(FederatedStrategy):
    """Average the participants' bodies, weighted by the trace of the Fisher information that each reports.

    A client that trained in few rounds has a small share then. If all traces are zero, weights are equal.

    Source: Yang et al. 2024, and the authors' code for the normalisation over participants.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: each has a weight of its own."""
        return "weights each body by its client's report"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the weighted mean, and the model itself without replies."""
        if not len(replies):
            return model
        weights = np.array([max(float(reply.tensors["report/fisher"]), 0.0) for reply in replies])
        return replies.mean("model", weights if weights.sum() > 0 else np.ones(len(replies)))
