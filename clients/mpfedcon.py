"""MpFedcon's client: FedRep's two phases, with a contrast between class centres and the initial model of the round."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.clients.fedrep import Config as FedRepConfig
from contrafed.clients.fedrep import FedRepClient
from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.core.split_model import SplitModel
from contrafed.training.base import PARTS, Batch, ClientStack, Shapes, Tensors
from contrafed.training.losses import cosine, masked_mean
from contrafed.training.prototypes import prototype_table, with_prototypes

# Of keys that only the contrast reads.
CONTRAST = OnlyWith("contrast_weight")


@dataclass(frozen=True)
class Config(FedRepConfig):
    """Hyper-parameters of the client, each with the paper's symbol."""

    contrast_weight: Annotated[float, Range(ge=0)]  # mu
    temperature: Annotated[float, Range(gt=0), CONTRAST]  # T
    invalid_centre: Annotated[Literal["mask", "zero_vector"], CONTRAST]  # no contrast, or a centre of zero
    frozen_model: Annotated[Literal["all", "body"], CONTRAST]  # which part of z_con's model is from the start of the round
    body_phase: Literal["body", "all"]  # which part trains in the body phase


class MpFedconClient(FedRepClient):
    """Train the head with cross-entropy, then the body with cross-entropy + mu l_con under the frozen head (Equation 6).

    The contrast is ``l_con = log(1 + e^((cos(z, z_con) - cos(z, z_glob)) / T))``. Here z is the projection under the model in
    training. The frozen z_con uses the client's model from the start of the round. The positive, z_glob, is the global centre
    (prototype) of the example's class.

    Source: Li et al. 2022 (doi:10.1051/wujns/2022276508), Algorithm 1.

    Deviation: line 25 of Algorithm 1 lacks mu, which Equation 6 has. An example whose class has no centre yet has l_con = 0.

    Interpretation: ``body_phase: all`` minimises over all parameters, as Equation 6 prints it. With ``frozen_model: body`` the
    body alone is frozen, as section 4.3 describes.
    """

    family = "personal, with prototypes"
    paper = Paper(
        authors="Li and others",
        title="MpFedcon: Model-Contrastive Personalized Federated Learning with the Class Center",
        where="Wuhan University Journal of Natural Sciences 27(6), 2022",
        url="https://doi.org/10.1051/wujns/2022276508",
    )
    traffic = ("phi omega", "phi omega")
    loss_names = ("task", "contrast")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the base encoder in both directions, centres with validity down, and own centres with counts up."""
        return with_prototypes(model, *super().message_spec(model, config))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Run Algorithm 1: freeze the initial model (line 11), train head and body, compute centres (Equation 3)."""
        start = {n: v.clone() for n, v in stack.params.items()}
        self.train_head(stack, "head batches")
        if self.config.frozen_model == "body":
            start |= {n: v.clone() for n, v in stack.params.items() if not self.is_shared(n)}  # the new head
        contrast = self.config.contrast_weight > 0
        self.train(
            stack,
            parts=self.shared_parts(self.config) if self.config.body_phase == "body" else PARTS,
            loss=self.loss if contrast else self.head_loss,
            reference_models={"start": start} if contrast else {},
            loss_inputs=prototype_table(stack),
        )
        return self.make_upload(stack) | self.prototypes(stack)

    def head_loss(self, params: Tensors, batch: Batch, loss_inputs: Any) -> dict[str, Tensor]:
        """Return the cross-entropy, which is also reported as the task's loss."""
        task = self.task_loss(self.forward(params, batch), batch)
        return {"loss": task, "task": task}

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted contrast, averaged over the whole batch."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        push, pull = cosine(features.z, loss_inputs["start"]), cosine(features.z, loss_inputs["means"][batch.y])
        known = loss_inputs["valid"][batch.y] if self.config.invalid_centre == "mask" else torch.ones_like(batch.mask)
        contrast = masked_mean(F.softplus((push - pull) / self.config.temperature) * known, batch.mask)
        return {"loss": task + self.config.contrast_weight * contrast, "task": task, "contrast": contrast}
