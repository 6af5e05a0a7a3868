"""FedAdam's strategy: Adam on the mean update."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    beta1: Annotated[float, Range(ge=0, lt=1)]
    beta2: Annotated[float, Range(ge=0, lt=1)]
    epsilon: Annotated[float, Range(gt=0)]  # tau in the paper


class FedAdam(FedAvg):
    """Step along Adam's direction of the mean update D.

    m := b1 m + (1 - b1) D and v := b2 v + (1 - b2) D^2. W := W + eta_g m / (sqrt(v) + eps). A round without replies changes
    nothing.

    Source: Reddi et al. 2021, Algorithm 2. v starts at eps^2, and there is no bias correction. Flower's FedAdam differs in
    both. Where D is far larger than eps, its first step is 0.74 of this one.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar and McMahan",
        title="Adaptive Federated Optimization",
        where="ICLR 2021",
        url="https://arxiv.org/abs/2003.00295",
    )
    linear_in_updates = True
    reply_weights = FedAvg.reply_weights

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Update both moments and step along their ratio."""
        config, mean = self.config, self.mean(model, replies)
        first, second = self.state.setdefault("first", {}), self.state.setdefault("second", {})
        out: Tensors = {}
        for name in self.shared_names:
            update = mean[name] - model[name].double()
            first[name] = config.beta1 * first.get(name, 0) + (1 - config.beta1) * update
            start = torch.full_like(update, config.epsilon**2)
            second[name] = self.second_moment(second.get(name, start), update.square())
            out[name] = model[name].double() + config.server_lr * first[name] / (second[name].sqrt() + config.epsilon)
        return out

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """Return v, given the v ``before`` and D^2."""
        beta2: float = self.config.beta2
        return beta2 * before + (1 - beta2) * square
