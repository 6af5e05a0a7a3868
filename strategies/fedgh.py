"""FedGH's strategy: train one head on the clients' class prototypes."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F

from contrafed.core.schema import Range
from contrafed.server.base import FederatedStrategy, Replies, Tensors


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
        pairs = [(reply.tensors["proto/mean"].double(), reply.tensors["proto/count"] > 0) for reply in replies]
        if not any(bool(held.any()) for _, held in pairs):
            return model
        z, y = torch.cat([means[held] for means, held in pairs]), torch.cat([held.nonzero().flatten() for _, held in pairs])
        head = {name: model[name].double() for name in self.shared_names}
        for rows in torch.arange(len(y), device=y.device).split(self.config.server_batch):
            leaves = {name: value.detach().requires_grad_() for name, value in head.items()}
            logits = F.linear(z[rows], leaves["classifier.weight"], leaves.get("classifier.bias"))
            gradients = torch.autograd.grad(F.cross_entropy(logits, y[rows]), list(leaves.values()))
            head = {
                n: leaf.detach() - self.config.server_lr * g for (n, leaf), g in zip(leaves.items(), gradients, strict=True)
            }
        return model | head
