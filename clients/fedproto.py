"""FedProto, the node half: only class prototypes travel (METHODS section 21)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clients.base import Client, Shapes, Tensors
from clients.losses import masked_mean
from clients.prototypes import with_prototypes
from clients.training.stack import Batch, LocalWork, Stack
from core.config import Range
from models.base import Features, SplitModel


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalWork
    prototype_weight: Annotated[float, Range(ge=0)]  # lambda
    predict: Literal["prototype", "head"]  # by the nearest global prototype, or by the classifier


class FedProtoClient(Client):
    """Cross-entropy + lambda * mean over the batch of |z - P_y|^2 / D; classes without a prototype count 0.

    Source: Tan et al. 2022. Judged by the nearest global prototype, and by its head as long as there is none.
    """

    shared = ()

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Prototypes with validity down, with counts up."""
        return with_prototypes(model, *super().messages(model, config))

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """The prototype of each example's class (B, b, D) and whether there is one (B, b)."""
        means, valid = stack.received["proto/mean"], stack.received["proto/valid"]
        rows = torch.arange(len(stack), device=means.device).unsqueeze(1)
        return {"prototype": means[rows, batch.y], "known": valid[rows, batch.y]}

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the distance to the class's prototype."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        distance = (features.z - constants["prototype"]).square().mean(-1) * constants["known"]
        distance = masked_mean(distance, batch.mask)
        return {"loss": task + self.config.prototype_weight * distance, "task": task, "distance": distance}

    def finish(self, stack: Stack) -> Tensors:
        """Send the class means of the trained model."""
        means, counts = self.prototypes(stack)
        return {"proto/mean": means, "proto/count": counts}

    def judge(self, features: Features, received: Tensors) -> Tensor:
        """Return scores (b, C): minus the distance to each global prototype, or logits before there is any."""
        valid = received["proto/valid"].to(features.z) > 0
        if self.config.predict == "head" or not bool(valid.any()):
            return features.logits
        distance = torch.cdist(features.z, received["proto/mean"].to(features.z))
        return -distance.masked_fill(~valid, torch.inf)
