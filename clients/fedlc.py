"""FedLC's client: calibrate logits by the client's class counts."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Tensors
from contrafed.training.losses import without
from contrafed.training.prototypes import class_counts


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    calibration: Annotated[float, Range(ge=0)]  # tau


class FedLCClient(Client):
    """Minimise cross-entropy of the logits minus tau n_c^(-1/4).

    n_c is the number of the client's training examples of class c. Evaluation uses the plain logits.

    Source: Zhang et al. 2022, Equation 5.

    Deviation: the true class stays in the softmax's sum, because without it the loss has no lower bound. A class without
    examples is left out of the sum, because its printed shift would be infinite. With tau = 0 the loss is FedAvg's. A client
    with a single class has a loss of 0, and only weight decay changes its model.
    """

    family = "one more term"
    paper = Paper(
        authors="Zhang, Li, Li, Xu, Wu, Ding and Wu",
        title="Federated Learning with Label Distribution Skew via Logits Calibration",
        where="ICML 2022",
        url="https://arxiv.org/abs/2209.00189",
    )

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train with the client's class counts."""
        self.train(stack, loss_inputs={"counts": class_counts(self.workspace, stack)})
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy of the calibrated logits."""
        features, counts = self.forward(params, batch), loss_inputs["counts"]  # (C,)
        if self.config.calibration:
            calibrated = features.logits - self.config.calibration * counts.clamp_min(1) ** -0.25
            features = features._replace(logits=without(calibrated, counts == 0))
        return {"loss": self.task_loss(features, batch)}
