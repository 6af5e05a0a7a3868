"""FedHyper's strategy: a learning rate that follows the product of successive updates."""

from dataclasses import dataclass
from typing import Annotated

import torch

from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    hyper_rate: Annotated[float, Range(ge=0)]
    bound: Annotated[float, Range(ge=1)]  # gamma
    scale_step: bool  # the global schedule


class FedHyper(FedAvg):
    """Step W += alpha_t D_t along the mean update D.

    alpha_t = clip(alpha_(t-1) + <D_t, D_(t-1)>, 1/gamma, gamma), and alpha_0 = 1. Without ``scale_step`` the step is W += D_t.
    A round without replies keeps alpha and D.

    Source: Wang et al. 2024, Equation 8 (schedule G). With ``strategy.scale_rate=true`` clients receive alpha to
    scale their rate (schedule SL). With ``scale_step=false`` as well it is SL alone.

    Deviation: ``hyper_rate`` multiplies the product, whose size depends on the model's size and the learning rate. In the paper
    it is 1.
    """

    linear_in_updates = True
    reply_weights = FedAvg.reply_weights
    aggregates_empty_rounds = True

    def setup(self) -> None:
        """Start at alpha = 1."""
        self.state["alpha"] = 1.0

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the model, and alpha for clients that ask for it."""
        known = {"rate/factor": torch.tensor(self.state["alpha"])}
        return super().broadcast(model) | {name: value for name, value in known.items() if name in self.broadcast_spec}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Adapt alpha and step along the mean update."""
        if len(replies):
            mean, bound, last = self.mean(model, replies), self.config.bound, self.state.get("last")
            update = {name: value - model[name].double() for name, value in mean.items()}
            if last is not None:
                product = sum(float((value * last[name]).sum()) for name, value in update.items())
                alpha = self.state["alpha"] + self.config.hyper_rate * product
                self.state["alpha"] = min(max(alpha, 1 / bound), bound)
            self.state["last"] = update
            factor = self.state["alpha"] if self.config.scale_step else 1.0
            model = {name: model[name] + factor * value for name, value in update.items()}
        self.round.metrics["alpha"] = self.state["alpha"]
        return model
