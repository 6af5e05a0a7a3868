"""FedAMP, the node half: each node is pulled to a cloud model of its own."""

from dataclasses import dataclass, replace
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import named
from contrafed.training.base import Client, LocalTraining, Stack, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalTraining
    pull_weight: Annotated[float, Range(ge=0)]  # lambda
    cloud_lr: Annotated[float, Range(gt=0)]  # alpha, the server's step, by which the pull is divided


class FedAMPClient(Client):
    """f(w) + lambda/(2 alpha) |w - u_k|^2 from the node's own last w; u_k, its cloud model, is what it receives.

    Source: Huang et al. 2021, Algorithm 1 and Equation 8, minimised by local work. w starts at the initial model.
    """

    family = "personal, a whole model"
    paper = Paper(
        authors="Huang, Chu, Zhou, Wang, Liu, Pei and Zhang",
        title="Personalized Cross-Silo Federated Learning on Non-IID Data",
        where="AAAI 2021",
        url="https://arxiv.org/abs/2007.03797",
    )
    own_model = True

    def fresh_memory(self, received: Tensors) -> Tensors:
        """w is the initial model."""
        return named("own", self.workspace.initial)

    def local_work(self, stack: Stack) -> Tensors:
        """Go on from the own model, pulled to the received one."""
        pull = self.config.pull_weight / self.config.cloud_lr
        stack.params = stack.remembered("own")
        self.train(stack, work=replace(self.config.local, proximal_weight=pull))
        stack.memory |= named("own", stack.params)
        return self.sent(stack)

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """A node is judged by its own model."""
        return {"model": stack.remembered("own")}
