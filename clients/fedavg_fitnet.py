"""FedAvg+FitNet, the node half: hold on to the received model's features at every level."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import Features
from contrafed.training.base import Batch, Client, LocalTraining, Stack, Tensors
from contrafed.training.losses import masked_mean


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalTraining
    hint_weight: Annotated[float, Range(ge=0)]
    levels: Annotated[int, Range(ge=1)] | Literal["last"]


class FitNetClient(Client):
    """Cross-entropy + weight * the mean over levels of |h_l - h_l(W)|^2 / width_l, W the model received this round.

    h_l are FedRCL's levels: the features of the encoder's stages, globally average-pooled. Source: Romero et al.
    2015 (FitNets), Equation 3, as FedRCL's tables use it. Deviations, none printed there: the hint is these levels of the same
    network, so that no regressor is needed, without a factor 1/2 and for all of local training.
    """

    family = "one more term"
    paper = Paper(
        authors="Romero, Ballas, Kahou, Chassang, Gatta and Bengio",
        title="FitNets: Hints for Thin Deep Nets",
        where="ICLR 2015, as FedRCL's tables use it",
        url="https://arxiv.org/abs/1412.6550",
    )

    def local_work(self, stack: Stack) -> Tensors:
        """Train beside the received model's levels."""
        self.train(stack, frozen={"hints": (partial(self.features, with_levels=True), stack.global_model)})
        return self.sent(stack)

    def loss(self, params: Tensors, batch: Batch, constants: dict[str, Features]) -> dict[str, Tensor]:
        """Cross-entropy and the distance to the hints."""
        features = self.forward(params, batch, with_levels=True)
        task, which = self.task_loss(features, batch), self.config.levels
        pairs = zip(features.compared(which), constants["hints"].compared(which), strict=True)
        each = [masked_mean((own - hint).square().mean(1), batch.mask) for own, hint in pairs]
        hint = torch.stack(each).mean()
        return {"loss": task + self.config.hint_weight * hint, "task": task, "hint": hint}
