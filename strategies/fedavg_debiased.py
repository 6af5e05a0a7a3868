"""Debiasing FedAvg's strategy: a plain mean, and a count by which clients find out how often they participate."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """No hyper-parameters."""


class FedAvgDebiased(FederatedStrategy):
    """Average the participants' updates with equal weights. Clients scale their own rate.

    Source: Sun et al. 2025, Algorithm 1, as reviews quote it.

    Deviation: the paper's cohorts have B clients. Here B is the mean number of valid replies in the rounds before this one,
    because cohorts may have different sizes and clients may fail. Before any reply it is the size of the round's cohort.
    """

    linear_in_updates = True
    aggregates_empty_rounds = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return that only means are used."""
        return ""

    def setup(self) -> None:
        """Start without replies."""
        self.state |= {"replies": 0, "rounds": 0}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return W, and how often a client participates up to the next aggregation on average (t B / K)."""
        rounds, replies = self.state["rounds"], self.state["replies"]
        count = (rounds + 1) * (replies / rounds if replies else len(self.round.participants))
        return super().broadcast(model) | {"participation/mean": torch.tensor(count / self.population.num_clients_with_data)}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Count the replies, and average."""
        self.state |= {"replies": self.state["replies"] + len(replies), "rounds": self.round.server_round}
        if not len(replies):
            return model
        return {name: model[name] + delta for name, delta in replies.mean("delta", np.ones(len(replies))).items()}

    def reply_weights(self, clients: np.ndarray, num_examples: np.ndarray) -> np.ndarray:
        """Return equal weights (m,)."""
        return np.ones(len(clients))
