"""FedProc's client: cross-entropy and a contrast with the global prototypes, in a mix that changes over rounds."""

from typing import Any

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.training.base import Batch, Client, ClientStack, Config, Shapes, Tensors
from contrafed.training.losses import masked_mean, prototype_contrast
from contrafed.training.prototypes import prototype_table, with_prototypes

__all__ = ["Config", "FedProcClient"]


class FedProcClient(Client):
    """Minimise a_t CE + (1 - a_t) L_p, with L_p = -log( e^(z.P_y) / sum_c e^(z.P_c) ).

    The sum is over the classes that have a prototype. z and P are normalised to length 1, without a temperature. P is the mean
    of z before this normalisation, in evaluation mode. An example whose class has no prototype has L_p = 0. a_t comes from the
    server.

    Source: Mu et al. 2023.

    Deviation: the paper's network has a projector of width 256. Here the model configuration decides. The paper also normalises
    z before the classifier, so that prototypes are means of normalised z. Here only the contrast normalises.
    """

    family = "contrast"
    paper = Paper(
        authors="Mu, Shen, Cheng, Geng, Fu, Zhang and Zhang",
        title="FedProc: Prototypical Contrastive Federated Learning on Non-IID Data",
        where="Future Generation Computer Systems, 2023",
        url="https://arxiv.org/abs/2109.12273",
    )
    traffic = ("theta omega", "theta omega")
    loss_names = ("task", "contrast")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the model in both directions, prototypes with validity and a_t down, and prototypes with counts up."""
        broadcast_spec, upload_spec = with_prototypes(model, *super().message_spec(model, config))
        return broadcast_spec | {"mix/weight": ()}, upload_spec

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the global prototypes, and upload the model and its own prototypes."""
        self.train(stack, loss_inputs=prototype_table(stack) | {"mix": stack.received["mix/weight"]})
        return self.make_upload(stack) | self.prototypes(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the mix of cross-entropy and contrast."""
        features, mix = self.forward(params, batch), loss_inputs["mix"]
        task = self.task_loss(features, batch)
        each = prototype_contrast(features.z, batch.y, loss_inputs["means"], loss_inputs["valid"])
        contrast = masked_mean(each, batch.mask)
        # At a mix of 1 this is exactly the cross-entropy, even if the contrast is not finite.
        loss = torch.where(mix < 1, mix * task + (1 - mix) * contrast, task)
        return {"loss": loss, "task": task, "contrast": contrast}
