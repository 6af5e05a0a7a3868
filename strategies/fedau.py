"""FedAU's strategy: weight each participant by the mean length of its past absences."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.server.intervals import Intervals
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    cutoff: Annotated[int, Range(ge=1)]  # K in the paper, C in PMFL's


class FedAU(FedAvg):
    """Step W += (eta_g / K) sum_k omega_k Delta_k.

    K is the number of all clients. omega_k is the mean length of client k's past participation intervals.

    Source: Wang and Ji 2024, Algorithms 1 and 2, with the weights of the authors' code. The interval that ends with this
    participation counts from the next one. A client without a past interval has weight 1.

    With ``weights=samples`` omega_k is multiplied by n_k over the mean of all n. The objective is then FedAvg's weighted one.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Wang and Ji",
        title="A Lightweight Method for Tackling Unknown Participation Statistics in Federated Averaging",
        where="ICLR 2024",
        url="https://arxiv.org/abs/2306.03401",
    )
    aggregates_empty_rounds = True

    def setup(self) -> None:
        """Start every client's interval."""
        self.intervals = Intervals(self.population.num_clients, self.config.cutoff, True, self.state)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Advance every client's interval, and return the weighted step."""
        weights = self.intervals.tick(replies.clients) * self.sample_weights(replies)
        self.round.client_metrics["weight"] = (replies.clients, weights)
        if not len(replies):
            return model
        step = replies.weighted_sum("delta", weights * self.config.server_lr / self.population.num_clients_with_data)
        return {name: model[name] + change for name, change in step.items()}

    def client_weights(self) -> np.ndarray:
        """Return omega_k of every client."""
        return self.intervals.weights * self.shares_of(self.population.sizes)
