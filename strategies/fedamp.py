"""FedAMP's strategy: mix all known models for every client, by their similarity to the client's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.core.weighted_sum import squared_distance, weighted_sum
from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    cloud_lr: Annotated[float, Range(gt=0)]  # alpha
    sigma: Annotated[float, Range(gt=0)]
    relative: bool  # whether to measure in units of the mean squared distance between known models
    cap: bool  # whether the others' weights sum to at most 1 - 1/m for m mixed models


class FedAMP(FederatedStrategy):
    """Send client k the mixture u_k = sum_j xi_kj w_j.

    xi_kj = (alpha / sigma) e^(-|w_k - w_j|^2 / sigma) for j != k. The rest of the weight is xi_kk. w_j is the last upload of
    client j. A client without an upload has the initial model and is in no other client's mixture.

    Source: Huang et al. 2021, Equations 4-7, with its A(x) = 1 - e^(-x / sigma).

    Deviation: with ``relative`` distances are in units of the mean squared distance between known models. Otherwise a mixture
    is the plain mean or the own model for nearly all scales of the weights. With ``cap`` the others' weights sum to at most
    1 - 1/m. Otherwise the own weight may be negative.
    """

    has_global_model = False  # the server's model stays the initial one

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: each client has its own mixture."""
        return "mixes single models for every client"

    def setup(self) -> None:
        """Start without any known model."""
        self.state |= {"known": {}, "spread": 0.0}
        self.own_weights: dict[int, float] = {}  # xi_kk of this round's participants

    def per_client_broadcast(self, model: Tensors, client: int, evaluating: bool) -> Tensors | None:
        """Return u_k for a client that trains."""
        if evaluating and not self.after_training:
            return None
        known: dict[int, Tensors] = self.state["known"]
        own, others = known.get(client, model), [known[other] for other in sorted(known) if other != client]
        weights = self.weights(own, others)
        self.own_weights[client] = 1 - sum(weights)
        mixed = weighted_sum([own, *others], [self.own_weights[client], *weights])
        return add_prefix("model", {name: value.to(own[name].dtype) for name, value in mixed.items()})

    def weights(self, own: Tensors, others: Sequence[Tensors]) -> list[float]:
        """Return xi_kj for every other known model."""
        unit, sigma = self.state["spread"] if self.config.relative else 1.0, self.config.sigma
        if not unit:  # fewer than two models are known, or all are equal
            return [0.0] * len(others)
        found = [self.config.cloud_lr / sigma * math.exp(-squared_distance(own, other) / unit / sigma) for other in others]
        most = 1 - 1 / (len(others) + 1)
        scale = most / sum(found) if self.config.cap and sum(found) > most else 1.0
        return [scale * weight for weight in found]

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Store each client's upload, and the mean distance of the known models."""
        own_weights = [self.own_weights[client] for client in replies.clients.tolist()]
        self.round.client_metrics["own_weight"] = (replies.clients, np.array(own_weights))
        for client, sent in zip(replies.clients.tolist(), replies.models(), strict=True):
            # Copy, since a reply may be a view of a buffer of many replies.
            self.state["known"][client] = {name: value.clone() for name, value in sent.items()}
        self.state["spread"] = mean_squared_distance(list(self.state["known"].values()))
        self.own_weights = {}
        return model


def mean_squared_distance(models: Sequence[Tensors]) -> float:
    """Return the mean squared distance between two different models, and 0 for fewer than two models."""
    if len(models) < 2:
        return 0.0
    mean = weighted_sum(models, [1 / len(models)] * len(models))
    return 2 / (len(models) - 1) * sum(squared_distance(model, mean) for model in models)
