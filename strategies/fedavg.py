"""FedAvg, the server half: the mean of the participants' models."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.data.participation import Participation
from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Weights:
    """What every rule over plain models has; a rule adds its own."""

    weights: Literal["samples", "uniform"]  # what a node counts in the objective: its training examples, or 1


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half; the paper's symbol beside each."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    weights: Literal["samples", "uniform", "all_nodes", "known_probability"]


class FedAvg(FederatedStrategy):
    """W += eta_g (sum_k weight_k w_k - W) over the participants, weights summing to 1: their mean where eta_g is 1.

    Source: McMahan et al. 2017, Algorithm 1. With ``weights=all_nodes`` W += (eta_g / K) sum_k Delta_k, K the number of all
    nodes: who is away counts as one that did not move. With ``known_probability`` W += (eta_g / K) sum_k Delta_k / p_k, p_k
    the share of rounds in which the node takes part in the long run: what rules that estimate p_k are compared with. Both
    from the comparisons of Wang and Ji 2024 (FedAU).
    """

    averages = True
    fixed_weights = ("all_nodes", "known_probability")

    @classmethod
    def check(cls, config: Any, node: Choice, participation: Choice) -> None:
        """The p_k must be known."""
        if config.weights == "known_probability" and not registry.only_subclass(participation.module, Participation).is_known():
            raise UserError(
                f"strategy.weights=known_probability: participation={participation.name} has no known probabilities"
            )

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """The rule sums alone, and most that build on it do."""
        return ""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """The step."""
        rate = self.config.server_lr
        if self.config.weights not in self.fixed_weights:
            mean = self.mean(model, replies)
            return mean if rate == 1 else {name: w + rate * (mean[name] - w) for name, w in model.items() if name in mean}
        weights = np.full(len(replies), rate / self.population.num_holders)
        if self.config.weights == "known_probability":
            probabilities = self.participation.probability()
            assert probabilities is not None  # by check
            weights /= probabilities[replies.nodes]
        self.round.node_metrics["weight"] = (replies.nodes, weights)
        return {name: model[name] + step for name, step in replies.weighted_sum("delta", weights).items()}

    def fixed_weight(self) -> float:
        """Return what each reply counts with one of ``fixed_weights`` where nodes have one probability."""
        weight = float(self.config.server_lr / self.population.num_holders)
        if self.config.weights == "all_nodes":
            return weight
        probabilities = self.participation.probability()
        assert probabilities is not None  # by check
        return weight / float(probabilities.max())

    def mean(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the participants' weighted mean; the model itself without replies."""
        if not len(replies):
            return model
        samples = self.config.weights == "samples"
        return replies.mean("model", replies.num_examples if samples else np.ones(len(replies)))

    def shares(self, replies: Replies) -> np.ndarray:
        """Return what each participant counts in the objective, in shares of which an average node of all K has one (m,)."""
        return self.shares_of(replies.num_examples)

    def shares_of(self, examples: np.ndarray) -> np.ndarray:
        """Return the same for nodes with so many training ``examples`` (m,)."""
        if self.config.weights == "uniform":
            return np.ones(len(examples))
        return examples * self.population.num_holders / self.population.sizes.sum()  # type: ignore[no-any-return]
