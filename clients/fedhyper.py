"""FedHyper's client: train as FedAvg does, at a learning rate that the server may scale."""

from dataclasses import dataclass, replace
from typing import Any

from contrafed.core.paper import Paper
from contrafed.core.split_model import SplitModel
from contrafed.training.base import Client, ClientStack, LocalTraining, Shapes, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    scale_rate: bool  # the server's local schedule


class FedHyperClient(Client):
    """Minimise cross-entropy at the learning rate alpha eta_l, with alpha from the server.

    Source: Wang et al. 2024, Equation 10 (SL).

    Deviation: the released code sets its rates again in every round, so this schedule has no effect there. Its bounds of the
    rate, 0.001 and 0.1, are left out.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Wang, Wang and Li",
        title="FedHyper: A Universal and Robust Learning Rate Scheduler for Federated Learning with Hypergradient Descent",
        where="ICLR 2024",
        url="https://arxiv.org/abs/2310.03156",
    )
    traffic = ("theta", "theta")

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return FedAvg's messages, and with ``scale_rate`` alpha down."""
        broadcast_spec, upload_spec = super().message_spec(model, config)
        return broadcast_spec | ({"rate/factor": ()} if config.scale_rate else {}), upload_spec

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train at the scaled rate, which is one number for all clients of a round."""
        local_training = self.config.local
        if self.config.scale_rate:
            local_training = replace(local_training, lr=local_training.lr * float(stack.received["rate/factor"][0]))
        self.train(stack, local_training=local_training)
        return self.make_upload(stack)
