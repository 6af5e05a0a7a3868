"""FedBABU, the node half: only the body learns; the head stays as it was drawn, until every node fine-tunes at the end."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from contrafed.clients.fedper import HEADS, FedPerClient
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import PARTS, LocalTraining, Stack, Tensors
from contrafed.training.tuning import tuned


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining
    head: Literal["classifier", "projector_classifier"]
    tune: Literal["all", "head"]
    tune_epochs: Annotated[int, Range(ge=0)]


class FedBABUClient(FedPerClient):
    """Cross-entropy on the shared body alone, under the head that every node drew from the run's seed.

    Source: Oh et al. 2022. The head never changes, so it does not travel. In the run's last evaluation every node fine-tunes
    what it received on its own data, for itself alone; what it was before is judged as ``untuned``.
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
        """The received body under the common head; at the end also fine-tuned, which then counts."""
        work = replace(self.config.local, epochs=self.config.tune_epochs, iterations=None, proximal_weight=0.0)
        return tuned(self, stack, work, PARTS if self.config.tune == "all" else HEADS[self.config.head])
