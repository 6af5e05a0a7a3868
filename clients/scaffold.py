"""SCAFFOLD's client: control variates correct the drift of local training."""

from typing import Any

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, Config, Shapes, Tensors, expand_like

__all__ = ["Config", "ScaffoldClient"]


class ScaffoldClient(Client):
    """Train with the correction c - c_k, then update the control variate c_k.

    Step: w -= eta (grad f(w) - c_k + c). Then: c_k+ = c_k - c + (W - w_end) / (sum of the steps' eta). c_k starts at 0. A
    client without steps keeps its c_k.

    Source: Karimireddy et al. 2020, Algorithm 1, option II.

    Deviation: the paper divides by K eta, with K local steps. With a rate that decays within the round, this is the sum of the
    rates. ``local.clip_norm`` clips the corrected gradient.
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
    whole_training_reason = "its control variates divide by the planned steps"
    plain_sgd_reason = "momentum and Adam make (W - w_end) / rates differ from the mean gradient"
    loss_names = ("task",)

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return W and c down, and the changes of the model and of c_k up."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        parameter_names = {f"model/{name}" for name in model.tensors().keys() - model.buffer_names}  # c corrects gradients
        shapes = {n.removeprefix("model/"): shape for n, shape in broadcast_spec.items() if n in parameter_names}
        control = {f"control/{name}": shape for name, shape in shapes.items()}
        return broadcast_spec | control, upload_spec | {f"control_delta/{name}": shape for name, shape in shapes.items()}

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return c_k = 0."""
        return {
            f"client_control/{name}": torch.zeros_like(value)
            for name, value in self.parameters_of(select_prefix(received, "model")).items()
        }

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the correction c - c_k, update c_k, and upload both changes."""
        c_k, c = stack.get_state("client_control"), select_prefix(stack.received, "control")
        self.train(stack, loss_inputs={name: c[name] - c_k[name] for name in c_k})
        upload = self.make_upload(stack)  # delta = w_end - W
        rate_sums = [self.config.local.total_rate(stack.server_round, size) for size in stack.sizes]
        for name in c:
            rate_sum = expand_like(c[name].new_tensor(rate_sums), c[name])
            control_delta = -c[name] - upload[f"delta/{name}"] / rate_sum  # c_k+ - c_k = -c + (W - w_end) / (sum of rates)
            upload[f"control_delta/{name}"] = torch.where(rate_sum > 0, control_delta, 0.0)
        stack.state |= add_prefix("client_control", {name: c_k[name] + upload[f"control_delta/{name}"] for name in c_k})
        return upload

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus <c - c_k, w>, whose gradient is the correction."""
        task = self.task_loss(self.forward(params, batch), batch)
        correction = torch.stack([(params[name] * value).sum() for name, value in loss_inputs.items()]).sum()
        return {"loss": task + correction, "task": task}
