"""FedDyn, the server half: the participants' mean, corrected by what all nodes have moved so far."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from contrafed.core.schema import Range
from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    proximal_weight: Annotated[float, Range(gt=0)]  # alpha, the nodes' own


class FedDyn(FederatedStrategy):
    """h := h - (alpha / K) sum Delta_k;  W := mean w_k - h / alpha, K the number of all nodes, the mean over participants.

    So h is the mean of all nodes' g_k, whoever takes part, as long as no reply is lost. Source: Acar et al. 2021,
    Algorithm 1, h = 0 at first. Deviation: its code gives nodes of unequal sizes an alpha each; here all have one, and all
    nodes count alike, as in the paper.
    """

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """h and W take a sum each."""
        return "takes two sums of the same updates"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Renew h, and step from the mean against it."""
        each, alpha, gradient = np.ones(len(replies)), self.config.proximal_weight, self.state.setdefault("gradient", {})
        for name, change in replies.weighted_sum("delta", each / self.population.num_holders).items():
            gradient[name] = gradient.get(name, 0) - alpha * change  # h
        return {name: mean - gradient[name] / alpha for name, mean in replies.mean("model", each).items()}
