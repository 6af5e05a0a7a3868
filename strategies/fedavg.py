"""FedAvg's strategy: the mean of the participants' models."""

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
    """The setting that all strategies over plain models share."""

    weights: Literal["samples", "uniform"]  # a client's weight in the objective: its training examples, or 1


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    weights: Literal["samples", "uniform", "all_clients", "known_probability"]


class FedAvg(FederatedStrategy):
    """Step W += eta_g (sum_k weight_k w_k - W) over the participants, with weights that sum to 1.

    With eta_g = 1 this is the participants' mean.

    Source: McMahan et al. 2017, Algorithm 1. Two further settings are from the comparisons of Wang and Ji 2024 (FedAU).

    - ``weights=all_clients``: W += (eta_g / K) sum_k Delta_k for K clients in all. An absent client counts as one that did not
      move.
    - ``weights=known_probability``: W += (eta_g / K) sum_k Delta_k / p_k. p_k is client k's long-term share of rounds.
    """

    linear_in_updates = True
    fixed_weights = ("all_clients", "known_probability")

    @classmethod
    def check(cls, config: Any, client: Choice, participation: Choice) -> None:
        """Raise ``UserError`` if the weights need the p_k and the participation pattern does not know them."""
        if config.weights == "known_probability" and not registry.only_subclass(participation.module, Participation).is_known():
            raise UserError(
                f"strategy.weights=known_probability: participation={participation.name} has no known probabilities"
            )

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return an empty reason: the strategy, like most that extend it, needs sums alone."""
        return ""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the model after the step."""
        rate = self.config.server_lr
        if self.config.weights not in self.fixed_weights:
            mean = self.mean(model, replies)
            return mean if rate == 1 else {name: w + rate * (mean[name] - w) for name, w in model.items() if name in mean}
        equal = rate / self.population.num_clients_with_data
        weights = np.full(len(replies), equal)
        if self.config.weights == "known_probability":
            probabilities = self.participation.probability()
            assert probabilities is not None  # by check
            weights /= probabilities[replies.clients]
        self.round.client_metrics["weight"] = (replies.clients, weights / equal)
        return {name: model[name] + step for name, step in replies.weighted_sum("delta", weights).items()}

    def reply_weights(self, clients: np.ndarray, num_examples: np.ndarray) -> np.ndarray:
        """Return the weights of a sum of replies, up to a common factor."""
        if self.config.weights == "samples":
            return num_examples
        probabilities = self.participation.probability() if self.config.weights == "known_probability" else None
        return np.ones(len(clients)) if probabilities is None else 1 / probabilities[clients]

    def fixed_weight(self) -> float:
        """Return each reply's weight under one of ``fixed_weights``, for clients with equal probabilities."""
        weight = float(self.config.server_lr / self.population.num_clients_with_data)
        if self.config.weights == "all_clients":
            return weight
        probabilities = self.participation.probability()
        assert probabilities is not None  # by check
        return weight / float(probabilities.max())

    def mean(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the participants' weighted mean, or the model itself without replies."""
        if not len(replies):
            return model
        samples = self.config.weights == "samples"
        return replies.mean("model", replies.num_examples if samples else np.ones(len(replies)))

    def sample_weights(self, replies: Replies) -> np.ndarray:
        """Return each participant's weight in the objective (m,), relative to the mean over all K clients."""
        return self.shares_of(replies.num_examples)

    def shares_of(self, examples: np.ndarray) -> np.ndarray:
        """Return the same for clients with so many training ``examples`` (m,)."""
        if self.config.weights == "uniform":
            return np.ones(len(examples))
        return examples * self.population.num_clients_with_data / self.population.sizes.sum()  # type: ignore[no-any-return]
