"""APFL's client: predict with a mixture of a personal model and the global model."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import PARTS, Batch, Client, ClientStack, LocalTraining, Step, Tensors, expand_like


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    alpha: Annotated[float, Range(ge=0, le=1)]  # the personal model's initial share
    adaptive: bool  # whether each client adapts its alpha, once a round


class APFLClient(Client):
    """Train the global model w and a personal model v, and predict with their mixture.

    Step of w: w -= eta grad f(w). Step of v: v -= eta alpha grad f(vbar), with vbar = alpha v + (1 - alpha) w. In the first
    step of a round: alpha := clip(alpha - eta <v - w, grad f(vbar)>, 0, 1). All three updates use the values from before the
    step. v starts at the initial model. Evaluated by alpha v + (1 - alpha) W.

    Source: Deng et al. 2020, Algorithm 1, which mixes parameters.

    Deviation: the authors' code steps w first, mixes logits and adds 0.02 alpha to the gradient of alpha.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Deng, Kamani and Mahdavi",
        title="Adaptive Personalized Federated Learning",
        where="arXiv, 2020",
        url="https://arxiv.org/abs/2003.13461",
    )
    own_model = True
    loss_names = ("task", "personal")

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the initial model as v, and the initial alpha."""
        alpha = torch.tensor(self.config.alpha, dtype=self.workspace.dtype, device=self.workspace.device)
        return add_prefix("own", self.workspace.initial) | {"alpha": alpha}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train w and v in the same steps, upload w and keep v."""
        both = stack.params | add_prefix("own", stack.get_state("own"))
        self.train(stack, params=both, parts=(*PARTS, "own"), before_step=self._adapt_alpha)
        stack.state |= add_prefix("own", select_prefix(both, "own"))
        return self.make_upload(stack)

    def _adapt_alpha(self, now: Step) -> Tensors:
        """Return alpha (B,), and adapt it in the round's first step for the steps that follow."""
        moving = now.stack.state["alpha"]
        alpha = moving.clone()
        if self.config.adaptive and now.number == 0:
            own, rate = select_prefix(now.stack.params, "own"), self.config.local.rate(now.stack.server_round)
            slope = self.gradients(super().loss, self._mix(alpha, own, now.stack.params), now.batch, {})
            along = [((own[name] - now.stack.params[name]) * g).reshape(len(g), -1).sum(1) for name, g in slope.items()]
            moving.sub_(rate * torch.stack(along).sum(0)).clamp_(0, 1)
        return {"alpha": alpha}

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return f(w) + f(vbar).

        f(vbar) has no gradient with respect to w. By the chain rule the gradient of v has the factor alpha.
        """
        w = {name: value for name, value in params.items() if "/" not in name}
        task = self.task_loss(self.forward(w, batch), batch)
        vbar = self._mix(
            loss_inputs["alpha"], select_prefix(params, "own"), {name: value.detach() for name, value in w.items()}
        )
        personal = self.task_loss(self.forward(vbar, batch), batch)
        return {"loss": task + personal, "task": task, "personal": personal}

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the mixture of v and the received model, by which a client is evaluated."""
        return {"model": self._mix(stack.state["alpha"], stack.get_state("own"), stack.params)}

    def _mix(self, alpha: Tensor, own: Tensors, shared: Tensors) -> Tensors:
        """Return vbar. Its buffers are v's, which no gradient moves: they are the statistics of vbar itself."""
        return own | mixture(alpha, self.parameters_of(own), shared)


def mixture(alpha: Tensor, own: Tensors, shared: Tensors) -> Tensors:
    """Return alpha v + (1 - alpha) w by name.

    Args:
        alpha: () for one client, or (B,) for several.
        own: v, the personal tensors.
        shared: w, the shared tensors.
    """
    return {name: torch.lerp(shared[name], v, expand_like(alpha, v) if alpha.dim() else alpha) for name, v in own.items()}
