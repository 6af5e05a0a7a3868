"""MOON's client: pull the representation towards the global model's, and push it from the previous local model's."""

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import cosine, masked_mean


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    contrast_weight: Annotated[float, Range(ge=0)]  # mu
    temperature: Annotated[float, Range(gt=0)]  # tau


class MoonClient(Client):
    """Minimise cross-entropy + mu * log(1 + e^((cos(z, z_prev) - cos(z, z_glob)) / tau)).

    The client state is the last local model. Before a client's first round it is the received model. The contrastive loss is
    then ln 2, with a gradient of 0.

    Source: Li et al. 2021 (MOON), Equation 3, with one previous model.
    """

    family = "contrast"
    paper = Paper(
        authors="Li, He and Song",
        title="Model-Contrastive Federated Learning",
        where="CVPR 2021",
        url="https://arxiv.org/abs/2103.16257",
    )
    loss_names = ("task", "contrast")

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the received model as the previous local model."""
        return add_prefix("previous", select_prefix(received, "model"))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the global and the previous local model, then keep the trained one."""
        self.train(stack, reference_models={"global": stack.global_model, "previous": select_prefix(stack.state, "previous")})
        stack.state |= add_prefix("previous", stack.params)
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted model-contrastive term."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        pull, push = cosine(features.z, loss_inputs["global"]), cosine(features.z, loss_inputs["previous"])
        contrast = masked_mean(F.softplus((push - pull) / self.config.temperature), batch.mask)
        return {"loss": task + self.config.contrast_weight * contrast, "task": task, "contrast": contrast}
