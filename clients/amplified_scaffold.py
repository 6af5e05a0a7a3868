"""Amplified SCAFFOLD's client: control variates that stay for a period, and become its mean gradient afterwards."""

from typing import Any

import torch

from contrafed.clients.scaffold import Config, ScaffoldClient
from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import ClientStack, Shapes, Tensors, expand_like

__all__ = ["AmplifiedScaffoldClient", "Config"]


class AmplifiedScaffoldClient(ScaffoldClient):
    """Train with SCAFFOLD's correction, and let c_k be the mean gradient of the client's last period with steps.

    Step: w -= eta (grad f(w) - c_k + c). The client adds up grad f(w) over its steps. Their mean becomes c_k when the next
    period begins. c_k starts at 0. The upload has the change of that mean, at first from c_k.

    Source: Crawshaw and Liu 2024, by the authors' code.

    Deviation: a round's mean gradient is (W - w_end) / (sum of the steps' eta) + c_k - c. It counts as many steps as the round
    has. ``local.clip_norm`` clips the corrected gradient.
    """

    family = "one more term"
    paper = Paper(
        authors="Crawshaw and Liu",
        title="Federated Learning under Periodic Client Participation and Heterogeneous Data: "
        "A New Communication-Efficient Algorithm and Analysis",
        where="NeurIPS 2024",
        url="https://arxiv.org/abs/2410.23131",
    )
    traffic = ("theta theta", "theta theta")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return SCAFFOLD's messages, and the number of the period down."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        return broadcast_spec | {"period/number": ()}, upload_spec

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return c_k = 0, no steps yet, and the period of the first round."""
        state = super().init_client_state(received)
        means = {name.replace("client_control", "mean_gradient"): torch.zeros_like(value) for name, value in state.items()}
        number = received["period/number"]
        return state | means | {"period/number": number.clone(), "period/steps": torch.zeros_like(number)}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the correction c - c_k, and upload the changes of the model and of the period's mean gradient."""
        c, number = select_prefix(stack.received, "control"), stack.received["period/number"]
        c_k, mean, steps = stack.get_state("client_control"), stack.get_state("mean_gradient"), stack.state["period/steps"]
        ended = (number > stack.state["period/number"]) & (steps > 0)
        c_k = {n: torch.where(expand_like(ended, v), mean[n], v) for n, v in c_k.items()}
        steps = torch.where(ended, 0.0, steps)
        self.train(stack, loss_inputs={name: c[name] - c_k[name] for name in c_k})
        upload = self.make_upload(stack)
        local = self.config.local
        rates = number.new_tensor([local.total_rate(stack.server_round, size) for size in stack.sizes])
        taken = number.new_tensor([local.steps(size) for size in stack.sizes])
        for name, value in c.items():
            total, share = expand_like(rates, value), expand_like(taken / (steps + taken).clamp_min(1), value)
            gradient = c_k[name] - value - upload[f"delta/{name}"] / total  # the round's mean
            before = torch.where(expand_like(steps > 0, value), mean[name], c_k[name])
            mean[name] = torch.where(total > 0, before + share * (gradient - before), before)
            upload[f"control_delta/{name}"] = mean[name] - before
        stack.state |= add_prefix("client_control", c_k) | add_prefix("mean_gradient", mean)
        stack.state |= {"period/number": number, "period/steps": steps + taken}
        return upload
