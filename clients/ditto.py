"""Ditto, the node half: FedAvg beside a personal model that is pulled to the received one."""

from dataclasses import dataclass, replace
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import named
from contrafed.training.base import Client, LocalTraining, Stack, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining
    pull_weight: Annotated[float, Range(ge=0)]  # lambda


class DittoClient(Client):
    """w: FedAvg's.  v -= eta (grad f(v) + lambda (v - W)), W the model received this round. Judged by v.

    Source: Li et al. 2021, Algorithm 1. v starts at the initial model and takes as many steps as w, in batches of its own: the
    authors step both on the same batch, v first; two phases keep w's path FedAvg's, bit for bit.
    """

    family = "personal, a whole model"
    paper = Paper(
        authors="Li, Hu, Beirami and Smith",
        title="Ditto: Fair and Robust Federated Learning Through Personalization",
        where="ICML 2021",
        url="https://arxiv.org/abs/2012.04221",
    )
    own_model = True

    def fresh_memory(self, received: Tensors) -> Tensors:
        """v is the initial model."""
        return named("own", self.workspace.initial)

    def local_work(self, stack: Stack) -> Tensors:
        """Train w, then v; w is sent, v stays."""
        self.train(stack)
        own, work = stack.remembered("own"), replace(self.config.local, proximal_weight=self.config.pull_weight)
        self.train(stack, params=own, work=work, purpose="personal batches")
        stack.memory |= named("own", own)
        return self.sent(stack)

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """A node is judged by v."""
        return {"model": stack.remembered("own")}

    def work_of(self, examples: int) -> int:
        """Return the steps of both models."""
        return 2 * super().work_of(examples)
