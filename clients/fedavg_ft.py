"""FedAvg+FT, the node half: FedAvg, then every node fine-tunes before it is judged for the last time."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from contrafed.clients.fedper import HEADS
from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import PARTS, Client, LocalTraining, Stack, Tensors
from contrafed.training.tuning import tuned


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalTraining
    head: Literal["classifier", "projector_classifier"]
    tune: Literal["head", "all"]  # or the whole model
    tune_epochs: Annotated[int, Range(ge=0)]
    tune_batch_size: Annotated[int, Range(ge=1)]
    tune_lr: Annotated[float, Range(gt=0)]
    tune_momentum: Annotated[float, Range(ge=0, lt=1)]


class FedAvgFTClient(Client):
    """FedAvg's local work; in the run's last evaluation every node first trains W on its own data, for itself alone.

    Source: a baseline in the code of Collins et al. 2021: ten epochs of the head, in one extra round of all nodes.
    """

    family = "personal, a whole model"
    paper = Paper(
        authors="Collins, Hassani, Mokhtari and Shakkottai",
        title="Exploiting Shared Representations for Personalized Federated Learning",
        where="ICML 2021",
        url="https://arxiv.org/abs/2102.07078",
    )
    own_model = True

    def judged(self, stack: Stack) -> dict[str, Tensors]:
        """W; at the end fine-tuned, and beside it W as ``untuned``."""
        config = self.config
        work = config.local.plain(config.tune_lr, epochs=config.tune_epochs)
        work = replace(work, batch_size=config.tune_batch_size, momentum=config.tune_momentum)
        return tuned(self, stack, work, HEADS[config.head] if config.tune == "head" else PARTS)
