"""FedAMP's client: each client is pulled towards a cloud model that the server mixes for it."""

from dataclasses import dataclass, replace
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.training.base import Client, ClientStack, LocalTraining, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    pull_weight: Annotated[float, Range(ge=0)]  # lambda
    cloud_lr: Annotated[float, Range(gt=0)]  # alpha, the server's step size, which divides the pull


class FedAMPClient(Client):
    """Minimise f(w) + lambda/(2 alpha) |w - u_k|^2 from the client's last w.

    u_k is the client's cloud model, which it receives. w starts at the initial model.

    Source: Huang et al. 2021, Algorithm 1 and Equation 8.

    Interpretation: Equation 8 is minimised by local training.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Huang, Chu, Zhou, Wang, Liu, Pei and Zhang",
        title="Personalized Cross-Silo Federated Learning on Non-IID Data",
        where="AAAI 2021",
        url="https://arxiv.org/abs/2007.03797",
    )
    own_model = True
    own_pull = "pull_weight"

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the initial model as w."""
        return add_prefix("own", self.workspace.initial)

    def local_update(self, stack: ClientStack) -> Tensors:
        """Continue from the own model, pulled towards the received one."""
        pull = self.config.pull_weight / self.config.cloud_lr
        stack.params = stack.get_state("own")
        self.train(stack, local_training=replace(self.config.local, proximal_weight=pull))
        stack.state |= add_prefix("own", stack.params)
        return self.make_upload(stack)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the own model, by which a client is evaluated."""
        return {"model": stack.get_state("own")}
