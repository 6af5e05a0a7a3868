"""FedRep, the node half: head epochs with the body frozen, then body epochs with the head frozen."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from contrafed.clients.fedper import HEADS, FedPerClient
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Client, LocalTraining, Stack, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining  # of the body phase; the head phase differs in its length alone
    head_epochs: Annotated[int, Range(ge=0)]  # tau_h
    head: Literal["classifier", "projector_classifier"]
    eval_head_refresh: bool  # whether the run's last evaluation also judges nodes by heads fitted to the final body


class FedRepClient(FedPerClient):
    """Cross-entropy, first on the personal head alone, then on the shared body alone. Source: Collins et al. 2021."""

    family = "personal, parts of the model"
    paper = Paper(
        authors="Collins, Hassani, Mokhtari and Shakkottai",
        title="Exploiting Shared Representations for Personalized Federated Learning",
        where="ICML 2021",
        url="https://arxiv.org/abs/2102.07078",
    )

    def local_work(self, stack: Stack) -> Tensors:
        """The head phase, then the body phase."""
        self.train_head(stack, "head batches")
        self.train(stack, parts=self.parts)
        return self.sent(stack)

    head_loss = Client.loss  # the task's alone, whatever the body's is

    def train_head(self, stack: Stack, purpose: str) -> None:
        """Fit the head to the body as it is, with the task's loss alone."""
        self.train(stack, work=self._head_work, parts=HEADS[self.config.head], loss=self.head_loss, purpose=purpose)

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """The body that it received and its own head; in the run's last evaluation also ``refit``, a head fitted to that body.

        The head of a node that was drawn rarely hardly trained.
        """
        if not (stack.final and self.config.eval_head_refresh):
            return {"model": stack.params}
        left = {n: v.clone() for n, v in stack.params.items()}
        self.train_head(stack, "final head batches")
        return {"model": left, "refit": stack.params}

    @property
    def _head_work(self) -> LocalTraining:
        return replace(self.config.local, epochs=self.config.head_epochs, iterations=None)

    def work_of(self, examples: int) -> int:
        """Return the steps of both phases."""
        return self._head_work.steps(examples) + super().work_of(examples)
