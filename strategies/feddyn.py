"""FedDyn's strategy: the participants' mean, corrected by the sum of all past updates."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from contrafed.core.schema import Range
from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    proximal_weight: Annotated[float, Range(gt=0)]  # alpha, equal to the clients'


class FedDyn(FederatedStrategy):
    """Update h := h - (alpha / K) sum Delta_k, and set W := mean w_k - h / alpha.

    K is the number of all clients, and the mean is over the participants. h starts at 0. If no reply is lost, h is the mean of
    all clients' g_k under any participation.

    Source: Acar et al. 2021, Algorithm 1.

    Deviation: the authors' code gives each client an alpha by its size. Here, as in the paper, all clients have one alpha and
    one weight.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: h and W are two sums of them."""
        return "takes two sums of the same updates"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Update h, and return the mean minus h / alpha."""
        each, alpha, gradient = np.ones(len(replies)), self.config.proximal_weight, self.state.setdefault("gradient", {})
        for name, change in replies.weighted_sum("delta", each / self.population.num_clients_with_data).items():
            gradient[name] = gradient.get(name, 0) - alpha * change  # h
        return {name: mean - gradient[name] / alpha for name, mean in replies.mean("model", each).items()}
