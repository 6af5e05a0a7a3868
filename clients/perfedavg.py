"""Per-FedAvg's client: learn a model that is good after one step on the client's own data."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.func import grad

from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors

BATCHES = {"first_order": 2, "hessian_free": 3, "exact": 2}  # batches that a step takes in turn


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining  # lr: b; iterations: tau
    inner_lr: Annotated[float, Range(ge=0)]  # a, of the inner step and of the step before evaluation
    gradient: Literal["first_order", "hessian_free", "exact"]  # no second derivatives, differences of gradients, or exact ones
    difference: Annotated[float, Range(gt=0), OnlyWith("gradient", "hessian_free")]  # delta of hessian_free


class PerFedAvgClient(Client):
    """Step w -= b (I - a H(w; B'')) grad f(w - a grad f(w; B); B'), with the Hessian H.

    Evaluated after one step of rate a from W.

    Source: Fallah et al. 2020, Algorithm 1. With ``gradient: first_order`` (FO), H is left out. With ``hessian_free`` (HF) two
    gradients, at a difference of delta to either side, estimate its product. With ``exact`` the step differentiates through the
    inner step, so that B'' is B.

    Deviation: B, B' and B'' are dealt in turn from one batch of two or three times the size. A batch with fewer examples than
    that is used whole in each.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Fallah, Mokhtari and Ozdaglar",
        title="Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
        where="NeurIPS 2020",
        url="https://arxiv.org/abs/2002.07948",
    )
    own_model = True
    whole_training_reason = "a step takes several batches, which are planned as several steps"
    loss_names = ("task",)

    @classmethod
    def upload_training(cls, config: Any) -> LocalTraining:
        """Return the training settings with the size of all of a step's batches together."""
        return replace(config.local, batch_size=BATCHES[config.gradient] * config.local.batch_size)

    @classmethod
    def smallest_batches(cls, config: Any, examples: int) -> dict[str, int]:
        """Return that of the batches into which a larger one is split."""
        count, training = BATCHES[config.gradient], cls.upload_training(config)
        sizes = training.smallest_batch(examples), min(training.batch_of(examples), examples)
        return {"strategy.local.batch_size": min(size if size < count else size // count for size in sizes)}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train as FedAvg does, on these larger batches."""
        self.train(stack, local_training=self.upload_training(self.config))
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return a loss whose gradient is the step's direction, and report f(w - a grad f(w; B); B')."""
        a, delta = self.config.inner_lr, self.config.difference
        support, query, *third = split_batch(batch, BATCHES[self.config.gradient])
        weights = self.parameters_of(params)
        buffers = {name: value for name, value in params.items() if name not in weights}
        slope = grad(self._task)(weights, buffers, support)
        if self.config.gradient != "exact":
            slope = {name: value.detach() for name, value in slope.items()}
        ahead = {name: value - a * slope[name] for name, value in weights.items()}
        task = total = self._task(ahead, buffers, query)
        for other in third:
            outer = {name: value.detach() for name, value in grad(self._task)(ahead, buffers, query).items()}
            either = [
                self._task({n: w + side * delta * outer[n] for n, w in weights.items()}, buffers, other) for side in (1, -1)
            ]
            total = total - a / (2 * delta) * (either[0] - either[1])
        return {"loss": total, "task": task}

    def _task(self, weights: Tensors, buffers: Tensors, batch: Batch) -> Tensor:
        return self.task_loss(self.forward(weights | buffers, batch), batch)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return W after one step on the client's own data, by which it is evaluated."""
        local_training = self.config.local.plain(self.config.inner_lr, iterations=1)
        self.train(stack, local_training=local_training, loss=super().loss, purpose="adaptation batches")
        return {"model": stack.params}

    def num_local_steps(self, examples: int) -> int:
        """Return the number of gradients of a round."""
        return BATCHES[self.config.gradient] * self.upload_training(self.config).steps(examples)


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """Split one client's batch into ``count`` batches, example by example in turn.

    A batch with fewer than ``count`` examples is used whole in each.
    """
    width = len(batch.y)
    place = torch.arange(max(-(-width // count), min(width, count - 1)), device=batch.y.device)
    few = batch.mask.sum() < count
    parts = []
    for first in range(count):
        index = torch.where(few, place, place * count + first)
        inside = index.clamp_max(width - 1)
        dropout = {layer: factors[inside] for layer, factors in batch.dropout.items()}
        parts.append(Batch(batch.x[inside], batch.y[inside], batch.mask[inside] * (index < width), dropout))
    return parts
