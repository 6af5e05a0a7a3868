"""MpFedcon, the node half: FedRep's two phases, the second with a contrast between class centres and the round's start."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clients.base import Shapes, Tensors
from clients.fedrep import Config as FedRepConfig
from clients.fedrep import FedRepClient
from clients.losses import cosine, masked_mean
from clients.prototypes import with_prototypes
from clients.training.stack import Batch, Stack
from core.config import Range
from models.base import SplitModel


@dataclass(frozen=True)
class Config(FedRepConfig):
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    contrast_weight: Annotated[float, Range(ge=0)]  # mu
    temperature: Annotated[float, Range(gt=0)]  # T
    invalid_centre: Literal["mask", "zero_vector"]  # a class without a centre: no contrast, or a centre of zero


class MpFedconClient(FedRepClient):
    """Head phase: cross-entropy. Body phase: cross-entropy + mu l_con with the head frozen (Equation 6, METHODS section 3).

    ``l_con = log(1 + e^((cos(z, z_con) - cos(z, z_glob)) / T))``: z is the projection under the model in training, z_con under
    the node's whole model as it was at the start of the round, z_glob the global centre (prototype) of the example's class.
    Deviations: Algorithm 1 line 25 lacks mu, which Equation 6 has; an example whose class has no centre yet has l_con = 0.
    """

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """The base encoder both ways; centres with validity down; the node's own centres with counts up."""
        return with_prototypes(model, *super().messages(model, config))

    def start(self, stack: Stack) -> None:
        """Freeze the model as the round begins, before the head phase (Algorithm 1, line 11)."""
        stack.scratch = {f"start/{n}": v.clone() for n, v in stack.params.items()}

    def _contrasts(self, stack: Stack) -> bool:
        return stack.phase == "batches" and self.config.contrast_weight > 0

    def frozen_models(self, stack: Stack) -> Mapping[str, Tensors]:
        """In the body phase the model as the round began, which gives z_con."""
        return {"start": {n: stack.scratch[f"start/{n}"] for n in stack.params}} if self._contrasts(stack) else {}

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """In the body phase z_glob (B, b, D), and whether the class has a centre (B, b)."""
        if not self._contrasts(stack):
            return {}
        means, valid = stack.received["proto/mean"], stack.received["proto/valid"]
        rows = torch.arange(len(stack), device=means.device).unsqueeze(1)
        known = valid[rows, batch.y] if self.config.invalid_centre == "mask" else torch.ones_like(batch.mask)
        return {"centre": means[rows, batch.y], "known": known}

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy, and in the body phase the contrast, averaged over the whole batch."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        if not constants:
            return {"loss": task, "task": task}
        push, pull = cosine(features.z, constants["start"]), cosine(features.z, constants["centre"])
        each = F.softplus((push - pull) / self.config.temperature) * constants["known"]
        contrast = masked_mean(each, batch.mask)
        return {"loss": task + self.config.contrast_weight * contrast, "task": task, "contrast": contrast}

    def finish(self, stack: Stack) -> Tensors:
        """Send the encoder, and the class centres of the trained model (Equation 3)."""
        means, counts = self.prototypes(stack)
        return super().finish(stack) | {"proto/mean": means, "proto/count": counts}
