"""FedAS's client: align the received body with the own one, train, and report the Fisher information."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Shapes, Tensors
from contrafed.training.batches import Batches
from contrafed.training.local_training import SEVERAL_PHASES
from contrafed.training.losses import cross_entropy

BODY = ("encoder", "projector")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    align_epochs: Annotated[int, Range(ge=0)]
    align_lr: Annotated[float, Range(gt=0)]
    align_batch: Annotated[int, Range(ge=1)]


class FedASClient(Client):
    """Align the received body with the client's own class means, then train body and own head with cross-entropy.

    Alignment minimises a sum over the classes c of a batch. A term is the mean of (z - m_c)^2, over the batch's examples of c
    and all numbers of z. Here m_c is the class's mean z under the body that the client trained last, at first the received one.

    After training the client reports the trace of the Fisher information. This is the sum over its batches of the squared norm
    of the mean gradient, in evaluation mode. Evaluated by the model that it trained last.

    Source: Yang et al. 2024, and the authors' code for the loss of the alignment, its rate and the batches of the trace.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Yang, Huang and Ye",
        title="FedAS: Bridging Inconsistency in Personalized Federated Learning",
        where="CVPR 2024",
        url="https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html",
    )
    traffic = ("phi", "phi")
    shared = BODY
    own_model = True
    whole_training_reason = SEVERAL_PHASES
    loss_names = ("task", "alignment")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the body in both directions, and the trace up."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        return broadcast_spec, upload_spec | {"report/fisher": ()}

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the received body as the one that was trained last."""
        return add_prefix("own", self.shared_of(select_prefix(received, "model")))

    @classmethod
    def align_training(cls, config: Any) -> LocalTraining:
        """Return the settings of the alignment."""
        return replace(config.local.plain(config.align_lr, config.align_epochs), batch_size=config.align_batch)

    @classmethod
    def smallest_batches(cls, config: Any, examples: int) -> dict[str, int]:
        """Return those of both phases."""
        align = {"strategy.align_batch": cls.align_training(config).smallest_batch(examples)} if config.align_epochs else {}
        return super().smallest_batches(config, examples) | align

    def local_update(self, stack: ClientStack) -> Tensors:
        """Align, train, compute the trace, keep the body and upload it."""
        own = replace(stack, params=stack.params | stack.get_state("own"))
        align = self.align_training(self.config)
        means = {"means": self.prototypes(own)["proto/mean"]}
        self.train(stack, local_training=align, parts=BODY, loss=self.alignment, loss_inputs=means, purpose="alignment batches")
        self.train(stack)
        stack.state |= add_prefix("own", self.shared_of(stack.params))
        return self.make_upload(stack) | {"report/fisher": self.fisher(stack)}

    def alignment(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the loss of one client's alignment."""
        z = self.forward(params, batch).z
        member = F.one_hot(batch.y, self.model.num_classes).to(z) * batch.mask.unsqueeze(1)  # (b, C)
        distance = (z - loss_inputs["means"][batch.y]).square().mean(-1)  # (b,)
        loss = (member.T @ distance / member.sum(0).clamp_min(1)).sum()
        return {"loss": loss, "alignment": loss}

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy of local training."""
        found = super().loss(params, batch, loss_inputs)
        return found | {"task": found["loss"]}

    def fisher(self, stack: ClientStack) -> Tensor:
        """Return each client's trace of the Fisher information (B,)."""
        batches = self.fisher_batches(stack)
        total = torch.zeros(len(stack), dtype=self.workspace.dtype, device=self.workspace.device)
        params = {name: value.detach() for name, value in stack.params.items()}
        for step in range(batches.index.shape[1]):
            stack.check_deadline()
            slopes = self.gradients(self._likelihood, params, batches.at(step, len(stack)), {})  # padding has none
            total += torch.stack([slope.square().flatten(1).sum(1) for slope in slopes.values()]).sum(0)
        return total

    def fisher_batches(self, stack: ClientStack) -> Batches:
        """Draw the batches of the trace: one pass in the size of local training."""
        once = replace(self.config.local, epochs=1, iterations=None, augment=())
        return Batches.draw(self.workspace, once, stack, "Fisher batches")

    def _likelihood(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.features(params, batch.x).logits, batch.y, batch.mask)}

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the body that the client trained last, with its head."""
        return {"model": stack.params | stack.get_state("own")}

    def num_local_steps(self, examples: int) -> int:
        """Return the number of steps of both phases."""
        return self.align_training(self.config).steps(examples) + super().num_local_steps(examples)
