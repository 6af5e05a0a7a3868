"""FedDyn's client: a linear and a quadratic term that align the clients' optima with the global one."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import squared_distance


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    proximal_weight: Annotated[float, Range(gt=0)]  # alpha


class FedDynClient(Client):
    """Minimise f_k(w) - <g_k, w> + (alpha/2) |w - W|^2, then set g_k := g_k - alpha (w_k - W).

    g_k starts at 0. If the local objective is solved exactly, g_k is the gradient of f_k at w_k.

    Source: Acar et al. 2021, Algorithm 1. Deviation: ``local.clip_norm`` clips the gradient of all three terms. The authors'
    code clips before it adds alpha w.
    """

    family = "one more term"
    paper = Paper(
        authors="Acar, Zhao, Matas Navarro, Mattina, Whatmough and Saligrama",
        title="Federated Learning Based on Dynamic Regularization",
        where="ICLR 2021",
        url="https://arxiv.org/abs/2111.04263",
    )
    loss_names = ("task",)

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return g_k = 0."""
        return {
            f"gradient/{name}": torch.zeros_like(value)
            for name, value in self.parameters_of(select_prefix(received, "model")).items()
        }

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with both terms, update g_k, and upload w_k."""
        received, own = self.parameters_of(stack.global_model), stack.get_state("gradient")
        self.train(stack, loss_inputs=add_prefix("global", received) | add_prefix("gradient", own))
        moved = {name: stack.params[name] - value for name, value in received.items()}
        alpha = self.config.proximal_weight
        stack.state |= add_prefix("gradient", {name: own[name] - alpha * value for name, value in moved.items()})
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the linear and the quadratic term."""
        task = self.task_loss(self.forward(params, batch), batch)
        linear = torch.stack([(params[n] * g).sum() for n, g in select_prefix(loss_inputs, "gradient").items()]).sum()
        pull = self.config.proximal_weight / 2 * squared_distance(params, select_prefix(loss_inputs, "global"))
        return {"loss": task - linear + pull, "task": task}
