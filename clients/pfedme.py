"""pFedMe's client: personal models by Moreau envelopes."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.errors import UserError
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Step, Tensors
from contrafed.training.losses import squared_distance


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining  # lr: eta_p. iterations: R, the batches of a round
    pull_weight: Annotated[float, Range(ge=0)]  # lambda
    inner_steps: Annotated[int, Range(ge=1)]  # K
    outer_lr: Annotated[float, Range(gt=0)]  # eta

    def __post_init__(self) -> None:
        if self.outer_lr * self.pull_weight >= 1:
            raise UserError(
                "strategy.outer_lr times strategy.pull_weight must be < 1, so that w stays between itself and theta, "
                f"got {self.outer_lr:g} * {self.pull_weight:g}"
            )


class PFedMeClient(Client):
    """Train a personal model theta, which the local model w follows.

    K times for a batch: theta -= eta_p (grad f(theta) + lambda (theta - w)). After each batch: w -= eta lambda (w - theta). w
    is uploaded. The client is evaluated by its theta.

    Source: T Dinh et al. 2020, Algorithm 1. As in the authors' code, theta starts a round at W and continues from batch to
    batch. Their term 0.001 theta in the inner step is ``local.weight_decay``.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="T Dinh, Tran and Nguyen",
        title="Personalized Federated Learning with Moreau Envelopes",
        where="NeurIPS 2020",
        url="https://arxiv.org/abs/2006.08848",
    )
    own_model = True
    own_pull = "pull_weight"
    plain_sgd_reason = "its inner steps solve for theta at a rate of their own"
    whole_training_reason = "each batch takes several steps"
    loss_names = ("task",)

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return theta = W."""
        return add_prefix("own", select_prefix(received, "model"))

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train theta and let w follow, upload w and keep theta."""
        both = stack.params | add_prefix("own", {name: w.clone() for name, w in stack.params.items()})
        self.train(stack, params=both, parts=("own",), before_step=self._after_each_batch, repeat=self.config.inner_steps)
        self._follow(both)
        stack.state |= add_prefix("own", select_prefix(both, "own"))
        return self.make_upload(stack)

    def _after_each_batch(self, now: Step) -> Tensors:
        """Let w follow before the next batch's first step. After the last batch ``local_update`` does it."""
        if now.number and now.number % self.config.inner_steps == 0:
            self._follow(now.stack.params)
        return {}

    def _follow(self, params: Tensors) -> None:
        """Step w -= eta lambda (w - theta)."""
        for name, theta in select_prefix(params, "own").items():
            params[name].lerp_(theta, self.config.outer_lr * self.config.pull_weight)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return f(theta) + lambda/2 |theta - w|^2."""
        theta = select_prefix(params, "own")
        task = self.task_loss(self.forward(theta, batch), batch)
        distance = squared_distance(theta, {name: params[name] for name in self.parameters_of(theta)})
        return {"loss": task + self.config.pull_weight / 2 * distance, "task": task}

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return theta after the client's last round, by which it is evaluated."""
        return {"model": stack.get_state("own")}

    def num_local_steps(self, examples: int) -> int:
        """Return the number of inner steps."""
        return self.config.inner_steps * super().num_local_steps(examples)
