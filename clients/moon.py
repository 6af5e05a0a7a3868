"""MOON, the node half: pull the representation to the global model's, push it from the node's previous one."""

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import group, named
from contrafed.training.base import Batch, Client, LocalTraining, Stack, Tensors
from contrafed.training.losses import cosine, masked_mean


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining
    contrast_weight: Annotated[float, Range(ge=0)]  # mu
    temperature: Annotated[float, Range(gt=0)]  # tau


class MoonClient(Client):
    """Cross-entropy + mu * log(1 + e^((cos(z, z_prev) - cos(z, z_glob)) / tau)).

    Source: Li et al. 2021 (MOON), Equation 3, with one previous model. Remembers the node's last local model; before a
    node's first round that is the received model, for which the loss is ln 2 and its gradient 0.
    """

    family = "contrast"
    paper = Paper(
        authors="Li, He and Song",
        title="Model-Contrastive Federated Learning",
        where="CVPR 2021",
        url="https://arxiv.org/abs/2103.16257",
    )

    def fresh_memory(self, received: Tensors) -> Tensors:
        """The received model stands in for the previous local one."""
        return named("previous", group(received, "model"))

    def local_work(self, stack: Stack) -> Tensors:
        """Train beside the global and the previous local model, then remember the trained one."""
        self.train(stack, frozen={"global": stack.global_model, "previous": group(stack.memory, "previous")})
        stack.memory |= named("previous", stack.params)
        return self.sent(stack)

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the model-contrastive term."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        pull, push = cosine(features.z, constants["global"]), cosine(features.z, constants["previous"])
        contrast = masked_mean(F.softplus((push - pull) / self.config.temperature), batch.mask)
        return {"loss": task + self.config.contrast_weight * contrast, "task": task, "contrast": contrast}
