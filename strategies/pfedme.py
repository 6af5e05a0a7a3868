"""pFedMe's strategy: move the model part of the way to the mean."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_mix: Annotated[float, Range(ge=0)]  # beta. Above 1 the step goes beyond the mean


class PFedMe(FedAvg):
    """Set W := (1 - beta) W + beta mean w_k.

    Source: T Dinh et al. 2020, Algorithm 1.

    Deviation: the mean is by examples, as in the authors' code. ``weights=uniform`` is the paper's.
    """

    linear_in_updates = True
    reply_weights = FedAvg.reply_weights

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Move the model part of the way to the mean."""
        mean, beta = self.mean(model, replies), self.config.server_mix
        return {name: (1 - beta) * model[name].double() + beta * value.double() for name, value in mean.items()}
