"""FedAvg+FitNet's client: stay close to the received model's features at every level."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import Features
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import masked_mean


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    hint_weight: Annotated[float, Range(ge=0)]
    levels: Annotated[int, Range(ge=1)] | Literal["last"]


class FitNetClient(Client):
    """Minimise cross-entropy + weight * the mean over levels of |h_l - h_l(W)|^2 / width_l.

    W is the model received this round. h_l are FedRCL's levels, the globally average-pooled features of the encoder's stages.

    Source: Romero et al. 2015 (FitNets), Equation 3, as FedRCL's tables use it.

    Interpretation: the paper prints none of this. The hint comes from the same levels of the same network, so no regressor is
    needed. There is no factor 1/2, and the term applies in all of local training.
    """

    family = "one more term"
    paper = Paper(
        authors="Romero, Ballas, Kahou, Chassang, Gatta and Bengio",
        title="FitNets: Hints for Thin Deep Nets",
        where="ICLR 2015, as FedRCL's tables use it",
        url="https://arxiv.org/abs/1412.6550",
    )
    reads_images = True
    loss_names = ("task", "hint")

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the received model's levels as hints."""
        self.train(stack, reference_models={"hints": (partial(self.features, with_levels=True), stack.global_model)})
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: dict[str, Features]) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted distance to the hints."""
        features = self.forward(params, batch, with_levels=True)
        task, which = self.task_loss(features, batch), self.config.levels
        pairs = zip(features.select_levels(which), loss_inputs["hints"].select_levels(which), strict=True)
        each = [masked_mean((own - hint).square().mean(1), batch.mask) for own, hint in pairs]
        hint = torch.stack(each).mean()
        return {"loss": task + self.config.hint_weight * hint, "task": task, "hint": hint}
