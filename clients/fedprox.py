"""FedProx's client: FedAvg's loss plus a pull towards the received model."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import squared_distance


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    proximal_weight: Annotated[float, Range(ge=0)]  # mu


class FedProxClient(Client):
    """Minimise cross-entropy + (mu/2) |w - W|^2, with W the model received this round.

    Source: Li et al. 2020, Equation 2.

    Deviation: the gamma-inexact stopping rule for stragglers is left out.
    """

    family = "one more term"
    paper = Paper(
        authors="Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith",
        title="Federated Optimization in Heterogeneous Networks",
        where="MLSys 2020",
        url="https://arxiv.org/abs/1812.06127",
    )
    loss_names = ("task",)

    @classmethod
    def upload_training(cls, config: Any) -> LocalTraining:
        """Return the training settings with the sum of both pulls towards W."""
        return replace(config.local, proximal_weight=config.local.proximal_weight + config.proximal_weight)

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the received model."""
        self.train(stack, loss_inputs=self.parameters_of(stack.global_model))
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the proximal term over every tensor of the model."""
        task = self.task_loss(self.forward(params, batch), batch)
        return {"loss": task + self.config.proximal_weight / 2 * squared_distance(params, loss_inputs), "task": task}
