"""FedDecorr, the node half: representations whose dimensions are not correlated."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.training.base import Batch, Client, LocalTraining, Tensors
from contrafed.training.losses import decorrelation


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalTraining
    decorrelation_weight: Annotated[float, Range(ge=0)]  # beta


class FedDecorrClient(Client):
    """Cross-entropy + beta (1/n) mean over i != j of (X^T X)_ij^2, X the batch's standardised representations.

    Source: Shi et al. 2023, Equation 5. Deviation: the paper's (1/d^2) |K|_F^2 has the diagonal of the correlations K in it;
    the authors' code leaves it out and has n - 1 times the correlations and 1/n before the mean, as here. A batch of one
    example counts 0.
    """

    family = "one more term"
    paper = Paper(
        authors="Shi, Liang, Zhang, Tan and Bai",
        title="Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning",
        where="ICLR 2023",
        url="https://arxiv.org/abs/2210.00226",
    )

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the correlations' penalty."""
        features = self.forward(params, batch)
        task, penalty = self.task_loss(features, batch), decorrelation(features.z, batch.mask)
        return {"loss": task + self.config.decorrelation_weight * penalty, "task": task, "decorrelation": penalty}
