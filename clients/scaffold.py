"""SCAFFOLD's client: control variates correct the drift of local training."""

from typing import Any

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, Config, Shapes, Stack, Tensors, per_node

__all__ = ["Config", "ScaffoldClient"]


class ScaffoldClient(Client):
    """Train with the correction c - c_k, then update the control variate c_k.

    Step: w -= eta (grad f(w) - c_k + c). Then: c_k := c_k - c + (W - w_end) / (sum of the steps' eta). c_k starts at 0. A
    client without steps keeps its c_k.

    Source: Karimireddy et al. 2020, Algorithm 1, option II.

    Deviation: the paper divides by K eta. With a rate that decays within the round, this is the sum of the rates.
    ``local.clip_norm`` clips the corrected gradient.
    """

    family = "one more term"
    paper = Paper(
        authors="Karimireddy, Kale, Mohri, Reddi, Stich and Suresh",
        title="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
        where="ICML 2020",
        url="https://arxiv.org/abs/1910.06378",
    )
    traffic = ("theta theta", "theta theta")
    upload = "delta"
    plain_sgd = "what it divides by the learning rates is the mean gradient of plain SGD alone"

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return W and c down, and the changes of the model and of c_k up."""
        down, up = super().messages(model, config)
        weights = {f"model/{name}" for name in model.tensors().keys() - model.buffer_names}  # c corrects gradients
        control = {name.replace("model/", "control/", 1): shape for name, shape in down.items() if name in weights}
        return down | control, up | control

    def fresh_memory(self, received: Tensors) -> Tensors:
        """Return c_k = 0."""
        return {
            f"control/{name}": torch.zeros_like(value)
            for name, value in self.parameters_of(select_prefix(received, "model")).items()
        }

    def local_work(self, stack: Stack) -> Tensors:
        """Train with the correction c - c_k, update c_k, and upload both changes."""
        own, c = stack.remembered("control"), select_prefix(stack.received, "control")
        self.train(stack, constants={name: c[name] - value for name, value in own.items()})
        sent = self.sent(stack)
        rates = [self.config.local.total_rate(stack.server_round, size) for size in stack.sizes]
        for name, value in c.items():
            total = per_node(value.new_tensor(rates), value)
            change = -value - sent[f"delta/{name}"] / total
            sent[f"control/{name}"] = torch.where(total > 0, change, 0.0)
        stack.memory |= add_prefix("control", {name: own[name] + sent[f"control/{name}"] for name in own})
        return sent

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus <c - c_k, w>, whose gradient is the correction."""
        task = self.task_loss(self.forward(params, batch), batch)
        drift = torch.stack([(params[name] * value).sum() for name, value in constants.items()]).sum()
        return {"loss": task + drift, "task": task}
