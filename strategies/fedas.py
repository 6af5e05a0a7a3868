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

    If all traces are zero, weights are equal. The paper expects small traces of clients that trained in few rounds. On the
    digits these have the larger ones.

    Source: Yang et al. 2024, and the authors' code for the normalisation over participants.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: each has its own weight."""
        return "weights each body by its client's report"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the weighted mean."""
        weights = np.array([max(float(reply.tensors["report/fisher"]), 0.0) for reply in replies])
        if not weights.sum() > 0:
            weights = np.ones(len(replies))
        self.round.client_metrics["weight"] = (replies.clients, weights / weights.mean())
        return replies.mean("model", weights)
