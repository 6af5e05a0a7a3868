"""Debiasing FedAvg's client: the less often it participates, the larger its learning rate."""

from typing import Any

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.training.base import Batch, Client, ClientStack, Config, Shapes, Tensors

__all__ = ["Config", "FedAvgDebiasedClient"]


class FedAvgDebiasedClient(Client):
    """Minimise nu_k * cross-entropy, which for plain SGD is a rate of nu_k eta. nu_k = 1 / (lambda_k K).

    lambda_k = t_k / (t B) is client k's share of all participations up to this round. It has participated t_k times, this round
    included. K is the number of clients and B the size of a cohort. Equal shares give nu_k = 1.

    Source: Sun et al. 2025, Algorithm 1. The equations are those that two public reviews of the paper quote, because its text
    was not at hand.

    Deviation: ``local.proximal_weight`` and ``local.weight_decay`` are not scaled. ``local.clip_norm`` clips the scaled
    gradient.
    """

    family = "one more term"
    paper = Paper(
        authors="Sun, Zhang, Xu, Joshi, Sharma and Wei",
        title="Debiasing Federated Learning with Correlated Client Participation",
        where="ICLR 2025",
        url="https://arxiv.org/abs/2410.01209",
    )
    traffic = ("theta", "theta")
    upload = "delta"
    plain_sgd_reason = "a client's rate is a factor on its loss, which Adam cancels"
    loss_names = ("task",)

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return FedAvg's messages, and the mean number of participations down."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        return broadcast_spec | {"participation/mean": ()}, upload_spec

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return that the client has not participated yet."""
        return {"participation/count": torch.zeros_like(received["participation/mean"])}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Count this participation, and train at the client's own rate."""
        count = stack.state["participation/count"] + 1
        self.train(stack, loss_inputs={"scale": stack.received["participation/mean"] / count})
        stack.state["participation/count"] = count
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the scaled cross-entropy, and the plain one."""
        task = self.task_loss(self.forward(params, batch), batch)
        return {"loss": loss_inputs["scale"] * task, "task": task}
