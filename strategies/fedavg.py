"""FedAvg, the server half: the mean of the participants' models (METHODS sections 0.2 and 6)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from strategies.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half; other rules over plain models add theirs."""

    weights: Literal["samples", "uniform"]  # what a node counts in the objective: its training examples, or 1


class FedAvg(FederatedStrategy):
    """W = sum_k weight_k w_k over the participants, weights summing to 1. Source: McMahan et al. 2017, Algorithm 1."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """The weighted mean; the model stays as it is in a round without replies."""
        if not len(replies):
            return model
        samples = self.config.weights == "samples"
        return replies.mean("model", replies.num_examples if samples else np.ones(len(replies)))

    def shares(self, replies: Replies) -> np.ndarray:
        """Return what each participant counts in the objective, in shares of which an average node of all K has one (m,)."""
        if self.config.weights == "uniform":
            return np.ones(len(replies))
        return replies.num_examples * self.population.num_holders / self.population.sizes.sum()
