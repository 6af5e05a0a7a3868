"""FedProto's client: share class prototypes alone."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import Features, SplitModel
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Shapes, Tensors
from contrafed.training.losses import masked_mean
from contrafed.training.prototypes import prototype_table, with_prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    prototype_weight: Annotated[float, Range(ge=0)]  # lambda
    predict: Literal["prototype", "head"]  # by the nearest global prototype, or by the classifier


class FedProtoClient(Client):
    """Minimise cross-entropy + lambda * mean over the batch of |z - P_y|^2 / D.

    Classes without a prototype add 0. Evaluated by the nearest global prototype, and by the head while there is no prototype.

    Source: Tan et al. 2022, Algorithm 1.
    """

    family = "personal, with prototypes"
    paper = Paper(
        authors="Tan, Long, Liu, Zhou, Lu, Jiang and Zhang",
        title="FedProto: Federated Prototype Learning across Heterogeneous Clients",
        where="AAAI 2022",
        url="https://arxiv.org/abs/2105.00243",
    )
    traffic = ("omega", "omega")
    shared = ()
    loss_names = ("task", "distance")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return prototypes with validity down, and with counts up."""
        return with_prototypes(model, *super().message_spec(model, config))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the global prototypes, and upload the trained model's own."""
        self.train(stack, loss_inputs=prototype_table(stack))
        return self.prototypes(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted distance to the class's prototype."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        distance = (features.z - loss_inputs["means"][batch.y]).square().mean(-1) * loss_inputs["valid"][batch.y]
        distance = masked_mean(distance, batch.mask)
        return {"loss": task + self.config.prototype_weight * distance, "task": task, "distance": distance}

    def scores(self, features: Features, received: Tensors) -> Tensor:
        """Return scores (b, C): minus the distance to each global prototype, or logits while there is none.

        A class without a prototype gets the largest distance plus 1. It is never predicted, and its loss stays finite.
        """
        if self.config.predict == "head":
            return features.logits
        valid = received["proto/valid"].to(features.z) > 0
        exact = "donot_use_mm_for_euclid_dist"  # a matrix product would cancel digits, differently for each batch size
        distance = torch.cdist(features.z, received["proto/mean"].to(features.z), compute_mode=exact)
        farthest = distance.masked_fill(~valid, 0).amax(1, keepdim=True)
        return torch.where(valid.any(), -torch.where(valid, distance, farthest + 1), features.logits)
