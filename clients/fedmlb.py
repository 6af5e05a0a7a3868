"""FedMLB's client: combine the received model's upper blocks with each of the client's lower blocks."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.split_model import Features
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import kl, masked_mean


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    hybrid_weight: Annotated[float, Range(ge=0)]  # lambda_1
    distil_weight: Annotated[float, Range(ge=0)]  # lambda_2
    temperature: Annotated[float, Range(gt=0)]  # T


class FedMLBClient(Client):
    """Minimise cross-entropy + lambda_1 mean_l CE(h_l) + lambda_2 mean_l KL(softmax(h_l / T) || softmax(main / T)).

    Hybrid path h_l has the client's stages up to l, and then the received model's stages. The received stages are frozen, but
    the gradient passes through them.

    Source: Kim et al. 2022 (multi-level branched regularization), Equations 3-7. As in the authors' code, both sides of the KL
    have a gradient and there is no factor T^2.

    Interpretation: a stage's output is taken after its last activation. The stages are those of the model, and each is a level.
    A ResNet-18 has five, and other networks have other numbers.
    """

    family = "one more term"
    paper = Paper(
        authors="Kim, Kim and Han",
        title="Multi-Level Branched Regularization for Federated Learning",
        where="ICML 2022",
        url="https://arxiv.org/abs/2207.06936",
    )
    reads_images = True
    loss_names = ("task", "hybrid", "distil")

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the received model's stages."""
        self.train(stack, loss_inputs=stack.global_model)
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy of the main path, plus the weighted cross-entropy and divergence of the hybrid paths."""
        main, hybrids = self.paths(params, batch, loss_inputs)
        task = self.task_loss(main, batch)
        hybrid = torch.stack([self.task_loss(path, batch) for path in hybrids]).mean()
        apart = [kl(path.logits, main.logits, self.config.temperature) for path in hybrids]
        distil = torch.stack([masked_mean(each, batch.mask) for each in apart]).mean()
        loss = task + self.config.hybrid_weight * hybrid + self.config.distil_weight * distil
        return {"loss": loss, "task": task, "hybrid": hybrid, "distil": distil}

    def paths(self, params: Tensors, batch: Batch, received: Tensors) -> tuple[Features, list[Features]]:
        """Return the main path's features of one client's batch, and those of each hybrid path.

        Returns:
            The main path's features, and a list of the hybrid paths' features, with the lowest branch first.
        """
        dropout = batch.dropout if self.model.dropout or self.model.draws else None
        with self.precision():
            with self.model.training_on(batch.mask, dropout), self.model.holding(params) as model:
                outputs = model.encoder.outputs(batch.x)
                main = model.resume(outputs[-1], len(outputs), dropout)
            with self.model.holding(received) as model:
                hybrids = [model.resume(a, level) for level, a in enumerate(outputs, start=1)]
        return self.widen_features(main), [self.widen_features(path) for path in hybrids]
