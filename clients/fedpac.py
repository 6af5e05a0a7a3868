"""FedPAC's client: FedRep's two phases with prototype alignment, and a head mixed from the clients' heads."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Shapes, Tensors, expand_like
from contrafed.training.local_training import SEVERAL_PHASES
from contrafed.training.losses import masked_mean
from contrafed.training.prototypes import prototype_table, with_prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining  # of the body phase. The head phase has its own length and rate
    head_epochs: Annotated[int, Range(ge=0)]
    head_lr: Annotated[float, Range(gt=0)]
    align_weight: Annotated[float, Range(ge=0)]  # lambda


class FedPACClient(Client):
    """Train the head with cross-entropy, then the body with cross-entropy + lambda |z - P_y|^2 / D.

    The head is frozen in the body phase. P_y is the global prototype of the example's class. If the class has none, P_y is the
    client's own prototype under the received body. While there is no prototype at all, the body phase minimises the
    cross-entropy alone.

    The client also uploads statistics, with which the server mixes heads. For class c they use its share p_c and the mean mu_c
    of z under the received body. The statistics are h_c = p_c mu_c (C, D) and v = (sum_c p_c E|z|^2_c - sum_c p_c^2 |mu_c|^2) /
    n.

    Evaluated by the received body and the mixed head, or the client's own head if the server mixed none. The second score,
    ``trained``, uses the body and head after the client's last local training.

    Source: Xu et al. 2023, Algorithm 1 and Section 4.
    """

    family = "personal, with prototypes"
    paper = Paper(
        authors="Xu, Tong and Huang",
        title="Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
        where="ICLR 2023",
        url="https://arxiv.org/abs/2306.11867",
    )
    traffic = ("theta omega", "theta omega v h")
    shared = ("encoder", "projector")
    whole_training_reason = SEVERAL_PHASES
    loss_names = ("task", "distance")
    model_names = ("trained",)

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the tensors of both directions.

        Both have the body and prototypes. Down adds the mixed head and its validity. Up adds the own head and the statistics.
        """
        broadcast_spec, upload_spec = with_prototypes(model, *super().message_spec(model, config))
        head = {f"head/{n}": tuple(p.shape) for n, p in model.named_parameters() if n.startswith("classifier.")}
        statistics: Shapes = {"stat/h": (model.num_classes, model.embedding_size), "stat/v": ()}
        return broadcast_spec | head | {"head/valid": ()}, upload_spec | head | statistics

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the received body as the client's last trained body."""
        return add_prefix("trained", self.shared_of(select_prefix(received, "model")))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Take the mixed head, compute statistics, train head and body, keep the body, and upload (Algorithm 1)."""
        stack.params |= self._mixed_head(stack)
        # From here on the head is the client's own.
        stack.received["head/valid"] = torch.zeros_like(stack.received["head/valid"])
        means, statistics = self._statistics(stack)
        self.train(
            stack,
            local_training=self._head_training,
            parts=("classifier",),
            loss=partial(Client.loss, self),
            purpose="head batches",
        )
        self.train(stack, parts=self.shared, loss_inputs=prototype_table(stack) | {"own": means})
        stack.state |= add_prefix("trained", self.shared_of(stack.params))
        head = add_prefix("head", {n: v for n, v in stack.params.items() if f"head/{n}" in stack.received})
        return self.make_upload(stack) | head | statistics | self.prototypes(stack)

    def _mixed_head(self, stack: ClientStack) -> Tensors:
        """Return the head that the server mixed, or the client's own if it mixed none."""
        valid = stack.received["head/valid"] > 0
        head = {n: v for n, v in select_prefix(stack.received, "head").items() if n != "valid"}
        return {n: torch.where(expand_like(valid, v), v, stack.params[n]) for n, v in head.items()}

    def _statistics(self, stack: ClientStack) -> tuple[Tensor, Tensors]:
        """Return the own class means under the received body (B, C, D), and h and v."""
        found = self.class_sums(stack)
        count, size = found["count"], found["count"].sum(1, keepdim=True).clamp_min(1)
        means = found["z"] / count.clamp_min(1).unsqueeze(-1)
        h = found["z"] / size.unsqueeze(-1)  # p_c mu_c, p_c = n_c / n
        spread = found["square"].sum(1) / size.squeeze(1) - h.square().sum((1, 2))
        return means, {"stat/h": h, "stat/v": spread / size.squeeze(1)}

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted distance to the class's prototype."""
        features, valid = self.forward(params, batch), loss_inputs["valid"] > 0
        task = self.task_loss(features, batch)
        target = torch.where(valid[batch.y].unsqueeze(1), loss_inputs["means"][batch.y], loss_inputs["own"][batch.y])
        distance = masked_mean((features.z - target).square().mean(1), batch.mask) * valid.any()
        return {"loss": task + self.config.align_weight * distance, "task": task, "distance": distance}

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the received body with the mixed head, and as ``trained`` the last trained body and head.

        After local training the first is the trained model too.
        """
        return {
            "model": stack.params | self._mixed_head(stack),
            "trained": stack.params | select_prefix(stack.state, "trained"),
        }

    @property
    def _head_training(self) -> LocalTraining:
        return replace(self.config.local, epochs=self.config.head_epochs, iterations=None, lr=self.config.head_lr)

    def num_local_steps(self, examples: int) -> int:
        """Return the number of steps of both phases."""
        return self._head_training.steps(examples) + super().num_local_steps(examples)
