"""FedNTD's client: keep the received model's predictions on the classes other than the true one."""

from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import Features
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import kl, masked_mean, without


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    task_weight: Annotated[float, Range(ge=0)]  # weight of the cross-entropy
    distil_weight: Annotated[float, Range(ge=0)]  # beta
    temperature: Annotated[float, Range(gt=0)]  # tau


class FedNTDClient(Client):
    """Minimise cross-entropy + beta tau^2 KL(softmax(g / tau) || softmax(l / tau)) over the classes other than the true one.

    l are the logits in training, and g those of the model received this round.

    Source: Lee et al. 2022, Equations 3-5. FedRCL's tables use 0.7 cross-entropy + 0.3 KL with tau = 1, which ``task_weight``
    allows.
    """

    family = "one more term"
    paper = Paper(
        authors="Lee, Jeong, Shin, Bae and Yun",
        title="Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
        where="NeurIPS 2022",
        url="https://arxiv.org/abs/2106.03097",
    )
    loss_names = ("task", "distil")

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the received model's logits."""
        self.train(stack, reference_models={"teacher": (self.features, stack.global_model)})
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: dict[str, Features]) -> dict[str, Tensor]:
        """Return the weighted sum of the cross-entropy and the distillation over the other classes."""
        features, temperature = self.forward(params, batch), self.config.temperature
        task, true = self.task_loss(features, batch), F.one_hot(batch.y, self.model.num_classes).bool()
        teacher, student = (without(x / temperature, true) for x in (loss_inputs["teacher"].logits, features.logits))
        distil = temperature**2 * masked_mean(kl(teacher, student), batch.mask)
        loss = self.config.task_weight * task + self.config.distil_weight * distil
        return {"loss": loss, "task": task, "distil": distil}
