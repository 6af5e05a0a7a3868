"""FedAvg, the server half: the mean of the participants' models (METHODS sections 0.2 and 6)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from strategies.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    weights: Literal["samples", "uniform"]  # by training examples, or one per participant


class FedAvg(FederatedStrategy):
    """W = sum_k weight_k w_k over the participants, weights summing to 1. Source: McMahan et al. 2017, Algorithm 1."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """The weighted mean; the model stays as it is in a round without replies."""
        if not len(replies):
            return model
        samples = self.config.weights == "samples"
        return model | replies.mean("model", replies.num_examples if samples else np.ones(len(replies)))
