"""FedAvg+FT's client: train as FedAvg does, then fine-tune every client before the last evaluation."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from contrafed.clients.fedper import HEADS
from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.training.base import PARTS, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.tuning import fine_tune


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    head: Annotated[Literal["classifier", "projector_classifier"], OnlyWith("tune", "head")]
    tune: Literal["head", "all"]  # all: the whole model
    tune_epochs: Annotated[int, Range(ge=0)]
    tune_batch_size: Annotated[int, Range(ge=1), OnlyWith("tune_epochs")]
    tune_lr: Annotated[float, Range(gt=0), OnlyWith("tune_epochs")]
    tune_momentum: Annotated[float, Range(ge=0, lt=1), OnlyWith("tune_epochs")]


class FedAvgFTClient(Client):
    """Train as FedAvg does, and fine-tune W on every client's own data before the run's last evaluation.

    Fine-tuned models are used for evaluation only.

    Source: a baseline in the code of Collins et al. 2021: ten epochs of the head, in one extra round of all clients.
    """

    family = "personal, all layers"
    paper = Paper(
        authors="Collins, Hassani, Mokhtari and Shakkottai",
        title="Exploiting Shared Representations for Personalized Federated Learning",
        where="ICML 2021",
        url="https://arxiv.org/abs/2102.07078",
    )
    own_model = True
    model_names = ("untuned",)

    @classmethod
    def tune_training(cls, config: Any) -> LocalTraining:
        """Return the settings of the fine-tuning."""
        local_training: LocalTraining = config.local.plain(config.tune_lr, epochs=config.tune_epochs)
        return replace(local_training, batch_size=config.tune_batch_size, momentum=config.tune_momentum)

    @classmethod
    def smallest_batches(cls, config: Any, examples: int) -> dict[str, int]:
        """Return those of local training, and of fine-tuning if it trains the encoder."""
        tunes = config.tune == "all" and config.tune_epochs
        tuned = {"strategy.tune_batch_size": cls.tune_training(config).smallest_batch(examples)} if tunes else {}
        return super().smallest_batches(config, examples) | tuned

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return W. In the last evaluation return the fine-tuned W, and W as ``untuned``."""
        parts = HEADS[self.config.head] if self.config.tune == "head" else PARTS
        return fine_tune(self, stack, self.tune_training(self.config), parts)
