"""FedLC, the node half: logits calibrated by how often the node has each class."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Batch, Client, LocalTraining, Stack, Tensors
from contrafed.training.losses import without
from contrafed.training.prototypes import class_counts


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalTraining
    calibration: Annotated[float, Range(ge=0)]  # tau


class FedLCClient(Client):
    """Cross-entropy of the logits less tau n_c^(-1/4), n_c the node's training examples of class c.

    Source: Zhang et al. 2022, Equation 5. Deviations: the true class stays in the softmax's sum, without which the loss has
    no lower bound; a class that the node does not have is left out of the sum, where the printed shift would be infinite.
    With tau = 0 both are FedAvg's. So a node of one class has a loss of 0 and sends back what it received, less weight decay.
    Nodes are judged by the logits as they are.
    """

    family = "one more term"
    paper = Paper(
        authors="Zhang, Li, Li, Xu, Wu, Ding and Wu",
        title="Federated Learning with Label Distribution Skew via Logits Calibration",
        where="ICML 2022",
        url="https://arxiv.org/abs/2209.00189",
    )

    def local_work(self, stack: Stack) -> Tensors:
        """Train with the node's class counts at hand."""
        self.train(stack, constants={"counts": class_counts(self.workspace, stack)})
        return self.sent(stack)

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy of the calibrated logits."""
        features, counts = self.forward(params, batch), constants["counts"]  # (C,)
        if self.config.calibration:
            calibrated = features.logits - self.config.calibration * counts.clamp_min(1) ** -0.25
            features = features._replace(logits=without(calibrated, counts == 0))
        return {"loss": self.task_loss(features, batch)}
