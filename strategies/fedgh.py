"""FedGH's strategy: train one head on the clients' class prototypes."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.core.schema import Range
from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import collect_prototypes, run_sgd


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    server_lr: Annotated[float, Range(ge=0)]
    server_batch: Annotated[int, Range(ge=1)]  # prototypes per step


class FedGH(FederatedStrategy):
    """Run one pass of SGD on cross-entropy(head(z), c) over the received prototypes (z, c).

    Prototypes are ordered by client and then class. A round without prototypes changes nothing.

    Source: Yi et al. 2023, Algorithm 1.

    Deviation: in the released code the optimiser does not hold the head, so it never changes. This follows the paper.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the head learns from each client's prototypes."""
        return "trains the head on single prototypes"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Train the head on the prototypes of the classes that clients hold."""
        if (prototypes := collect_prototypes(replies)) is None:
            return model
        batches = torch.arange(len(prototypes[1]), device=prototypes[1].device).split(self.config.server_batch)
        head = {name: model[name].double() for name in self.shared_names}
        return model | run_sgd(head, head_loss, prototypes, batches, self.config.server_lr)


def head_loss(head: Tensors, z: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross-entropy of a head on prototypes z (b, D) of classes y (b,)."""
    return F.cross_entropy(F.linear(z, head["classifier.weight"], head.get("classifier.bias")), y)
