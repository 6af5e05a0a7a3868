"""FedAvgM's strategy: momentum on the mean update."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    server_momentum: Annotated[float, Range(ge=0, lt=1)]  # rho


class FedAvgM(FedAvg):
    """Step m := rho m + mean Delta, and W := W + eta_g m.

    A round without replies changes neither.

    Source: Hsu et al. 2019.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Hsu, Qi and Brown",
        title="Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
        where="arXiv, 2019",
        url="https://arxiv.org/abs/1909.06335",
    )
    linear_in_updates = True
    reply_weights = FedAvg.reply_weights

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Add the mean update to the momentum and the momentum to the model."""
        mean, momentum = self.mean(model, replies), self.state.setdefault("momentum", {})
        for name in self.shared_names:
            update = mean[name] - model[name].double()
            momentum[name] = self.config.server_momentum * momentum.get(name, 0) + update
        return {name: model[name].double() + self.config.server_lr * momentum[name] for name in self.shared_names}
