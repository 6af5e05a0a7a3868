"""FedRep's client: train the head with the body frozen, then the body with the head frozen."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from contrafed.clients.fedper import HEADS, FedPerClient
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Client, ClientStack, LocalTraining, Tensors
from contrafed.training.local_training import SEVERAL_PHASES


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining  # of the body phase. The head phase has the same, but its own length
    head_epochs: Annotated[int, Range(ge=0)]  # tau_h
    head: Literal["classifier", "projector_classifier"]
    eval_head_refresh: bool  # whether the last evaluation also fits heads to the final body


class FedRepClient(FedPerClient):
    """Minimise cross-entropy, first over the personal head alone, then over the shared body alone.

    Source: Collins et al. 2021, Algorithm 1.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Collins, Hassani, Mokhtari and Shakkottai",
        title="Exploiting Shared Representations for Personalized Federated Learning",
        where="ICML 2021",
        url="https://arxiv.org/abs/2102.07078",
    )
    whole_training_reason = SEVERAL_PHASES
    model_names = ("refit",)

    def local_update(self, stack: ClientStack) -> Tensors:
        """Run the head phase, then the body phase."""
        self.train_head(stack, "head batches")
        self.train(stack, parts=self.shared_parts(self.config))
        return self.make_upload(stack)

    head_loss = Client.loss  # the task's loss, also in a subclass with another body loss

    def train_head(self, stack: ClientStack, purpose: str) -> None:
        """Fit the head to the current body with the task's loss alone."""
        head = HEADS[self.config.head]
        self.train(stack, local_training=self._head_training, parts=head, loss=self.head_loss, purpose=purpose)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the received body and the own head, and in the last evaluation also ``refit``.

        ``refit`` is a head fitted to that body, because the head of a rarely selected client has hardly trained.
        """
        if not (stack.final and self.config.eval_head_refresh):
            return {"model": stack.params}
        left = {n: v.clone() for n, v in stack.params.items()}
        self.train_head(stack, "final head batches")
        return {"model": left, "refit": stack.params}

    @property
    def _head_training(self) -> LocalTraining:
        return replace(self.config.local, epochs=self.config.head_epochs, iterations=None)

    def num_local_steps(self, examples: int) -> int:
        """Return the number of steps of both phases."""
        return self._head_training.steps(examples) + super().num_local_steps(examples)
