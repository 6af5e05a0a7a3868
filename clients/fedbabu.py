"""FedBABU's client: train the body under a fixed initial head, and fine-tune before the last evaluation."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from contrafed.clients.fedper import HEADS, FedPerClient
from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.training.base import PARTS, ClientStack, LocalTraining, Tensors
from contrafed.training.tuning import fine_tune


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client."""

    local: LocalTraining
    head: Literal["classifier", "projector_classifier"]
    tune: Literal["all", "head"]
    tune_epochs: Annotated[int, Range(ge=0)]
    tune_lr: Annotated[float, Range(gt=0), OnlyWith("tune_epochs")]
    tune_momentum: Annotated[float, Range(ge=0, lt=1), OnlyWith("tune_epochs")]


class FedBABUClient(FedPerClient):
    """Minimise cross-entropy over the shared body alone, under a head that all clients draw from the run's seed.

    The head never changes, so it is not sent. In the run's last evaluation every client fine-tunes the received model on its
    own data. It uses SGD with its own rate, for evaluation only. The model before that is evaluated as ``untuned``.

    Source: Oh et al. 2022, Algorithm 1.

    Deviation: the authors' training rate falls to a tenth after half and three quarters of the rounds.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Oh, Kim and Yun",
        title="FedBABU: Towards Enhanced Representation for Federated Image Classification",
        where="ICLR 2022",
        url="https://arxiv.org/abs/2106.06042",
    )
    model_names = ("untuned",)

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train the body."""
        self.train(stack, parts=self.shared_parts(self.config))
        return self.make_upload(stack)

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the received body under the common head. In the last evaluation return it fine-tuned as well."""
        parts = PARTS if self.config.tune == "all" else HEADS[self.config.head]
        return fine_tune(self, stack, self.tune_training(self.config), parts)

    @classmethod
    def tune_training(cls, config: Any) -> LocalTraining:
        """Return the settings of the fine-tuning."""
        return replace(
            config.local, epochs=config.tune_epochs, iterations=None, proximal_weight=0.0, optimizer="sgd", lr=config.tune_lr,
            momentum=config.tune_momentum, lr_decay=1.0, epoch_lr_decay=1.0,
        )  # fmt: skip

    @classmethod
    def smallest_batches(cls, config: Any, examples: int) -> dict[str, int]:
        """Return that of both trainings, which have batches of one size."""
        sizes = super().smallest_batches(config, examples)
        if config.tune != "all" or not config.tune_epochs:
            return sizes
        return {key: min(size, cls.tune_training(config).smallest_batch(examples)) for key, size in sizes.items()}
