"""APFL, the node half: predict by a mixture of a personal model and the global one."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import group, named
from contrafed.training.base import PARTS, Batch, Client, LocalTraining, Stack, Step, Tensors, per_node


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining
    alpha: Annotated[float, Range(ge=0, le=1)]  # the personal model's share, at first
    adaptive: bool  # whether each node moves its alpha, once a round


class APFLClient(Client):
    """w -= eta grad f(w);  v -= eta alpha grad f(vbar), vbar = alpha v + (1 - alpha) w;  in a round's first step
    alpha := clip(alpha - eta <v - w, grad f(vbar)>, 0, 1). Judged by alpha v + (1 - alpha) W.

    Source: Deng et al. 2020, Algorithm 1, which mixes parameters; all three use the values from before the step. v starts at
    the initial model. Deviation: the authors' code steps w first, mixes logits and adds 0.02 alpha to alpha's gradient.
    """

    family = "personal, a whole model"
    paper = Paper(
        authors="Deng, Kamani and Mahdavi",
        title="Adaptive Personalized Federated Learning",
        where="arXiv, 2020",
        url="https://arxiv.org/abs/2003.13461",
    )
    own_model = True

    def fresh_memory(self, received: Tensors) -> Tensors:
        """v is the initial model."""
        alpha = torch.tensor(self.config.alpha, dtype=self.workspace.dtype, device=self.workspace.device)
        return named("own", self.workspace.initial) | {"alpha": alpha}

    def local_work(self, stack: Stack) -> Tensors:
        """Train w and v side by side; w is sent, v stays."""
        both = stack.params | named("own", stack.remembered("own"))
        self.train(stack, params=both, parts=(*PARTS, "own"), each_step=self._share)
        stack.memory |= named("own", group(both, "own"))
        return self.sent(stack)

    def _share(self, now: Step) -> Tensors:
        """Return alpha (B,); in the round's first step move it for the steps that follow."""
        moving = now.stack.memory["alpha"]
        alpha = moving.clone()
        if self.config.adaptive and now.number == 0:
            own, rate = group(now.stack.params, "own"), self.config.local.rate(now.stack.server_round)
            slope = self.gradients(super().loss, self._mix(alpha, own, now.stack.params), now.batch, {})
            along = [((own[name] - now.stack.params[name]) * g).reshape(len(g), -1).sum(1) for name, g in slope.items()]
            moving.sub_(rate * torch.stack(along).sum(0)).clamp_(0, 1)
        return {"alpha": alpha}

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """f(w) + f(vbar), the latter without gradient into w: the chain rule gives v's its factor alpha."""
        w = {name: value for name, value in params.items() if "/" not in name}
        task = self.task_loss(self.forward(w, batch), batch)
        vbar = self._mix(constants["alpha"], group(params, "own"), {name: value.detach() for name, value in w.items()})
        personal = self.task_loss(self.forward(vbar, batch), batch)
        return {"loss": task + personal, "task": task, "personal": personal}

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """A node is judged by the mixture of v and the received model."""
        return {"model": self._mix(stack.memory["alpha"], stack.remembered("own"), stack.params)}

    def _mix(self, alpha: Tensor, own: Tensors, shared: Tensors) -> Tensors:
        """Return vbar. Its buffers are v's, which no gradient moves: they are the statistics of vbar itself."""
        return own | mixture(alpha, self.parameters_of(own), shared)


def mixture(alpha: Tensor, own: Tensors, shared: Tensors) -> Tensors:
    """Return alpha v + (1 - alpha) w by name, of one node (alpha ()) or several (B,)."""
    return {name: torch.lerp(shared[name], v, per_node(alpha, v) if alpha.dim() else alpha) for name, v in own.items()}
