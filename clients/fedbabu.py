"""FedBABU's client: train the body under a fixed initial head, and fine-tune before the last evaluation."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from contrafed.clients.fedper import HEADS, FedPerClient
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import PARTS, LocalTraining, Stack, Tensors
from contrafed.training.tuning import tuned


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    head: Literal["classifier", "projector_classifier"]
    tune: Literal["all", "head"]
    tune_epochs: Annotated[int, Range(ge=0)]


class FedBABUClient(FedPerClient):
    """Minimise cross-entropy over the shared body alone, under a head that all clients draw from the run's seed.

    The head never changes, so it is not sent. In the run's last evaluation every client fine-tunes the received model on its
    own data, for evaluation only. The model before that is evaluated as ``untuned``.

    Source: Oh et al. 2022.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Oh, Kim and Yun",
        title="FedBABU: Towards Enhanced Representation for Federated Image Classification",
        where="ICLR 2022",
        url="https://arxiv.org/abs/2106.06042",
    )

    def local_work(self, stack: Stack) -> Tensors:
        """Train the body."""
        self.train(stack, parts=self.parts)
        return self.sent(stack)

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """Return the received body under the common head. In the last evaluation return it fine-tuned as well."""
        work = replace(self.config.local, epochs=self.config.tune_epochs, iterations=None, proximal_weight=0.0)
        return tuned(self, stack, work, PARTS if self.config.tune == "all" else HEADS[self.config.head])
