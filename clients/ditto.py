"""Ditto's client: FedAvg, and a personal model that is pulled towards the received one."""

from dataclasses import dataclass, replace
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.training.base import Client, ClientStack, LocalTraining, Tensors
from contrafed.training.local_training import SEVERAL_PHASES


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    pull_weight: Annotated[float, Range(ge=0)]  # lambda


class DittoClient(Client):
    """Train w as FedAvg does, and a personal model v that is pulled towards the received model W.

    Step of v: v -= eta (grad f(v) + lambda (v - W)). Evaluated by v. v starts at the initial model and takes as many steps as
    w, on other batches.

    Source: Li et al. 2021, Algorithm 1.

    Deviation: the authors step both models on the same batch, v first. Two separate phases keep the path of w equal to
    FedAvg's, bit for bit.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Li, Hu, Beirami and Smith",
        title="Ditto: Fair and Robust Federated Learning Through Personalization",
        where="ICML 2021",
        url="https://arxiv.org/abs/2012.04221",
    )
    own_model = True
    whole_training_reason = SEVERAL_PHASES

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return the initial model as v."""
        return add_prefix("own", self.workspace.initial)

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train w and then v, upload w and keep v."""
        self.train(stack)
        own, local_training = stack.get_state("own"), replace(self.config.local, proximal_weight=self.config.pull_weight)
        self.train(stack, params=own, local_training=local_training, purpose="personal batches")
        stack.state |= add_prefix("own", own)
        return self.make_upload(stack)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return v, by which a client is evaluated."""
        return {"model": stack.get_state("own")}

    def num_local_steps(self, examples: int) -> int:
        """Return the number of steps of both models."""
        return 2 * super().num_local_steps(examples)
