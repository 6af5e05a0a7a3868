"""FedDecorr's client: learn representations whose dimensions are not correlated."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Batch, Client, LocalTraining, Tensors
from contrafed.training.losses import decorrelation


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    decorrelation_weight: Annotated[float, Range(ge=0)]  # beta


class FedDecorrClient(Client):
    """Minimise cross-entropy + beta (1/n) mean over i != j of (X^T X)_ij^2.

    X are the batch's standardised representations. A batch of one example adds 0.

    Source: Shi et al. 2023, Equation 5.

    Deviation: the paper's (1/d^2) |K|_F^2 includes the diagonal of the correlations K. As in the authors' code, the diagonal is
    left out, the correlations are n - 1 times as large, and the mean has the factor 1/n.
    """

    family = "one more term"
    paper = Paper(
        authors="Shi, Liang, Zhang, Tan and Bai",
        title="Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning",
        where="ICLR 2023",
        url="https://arxiv.org/abs/2210.00226",
    )
    loss_names = ("task", "decorrelation")

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted penalty on correlations."""
        features = self.forward(params, batch)
        task, penalty = self.task_loss(features, batch), decorrelation(features.z, batch.mask)
        return {"loss": task + self.config.decorrelation_weight * penalty, "task": task, "decorrelation": penalty}
