"""FedAdagrad's strategy: Adagrad on the mean update."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from contrafed.core.schema import Range
from contrafed.strategies.fedadam import FedAdam
from contrafed.strategies.fedavg import Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    beta1: Annotated[float, Range(ge=0, lt=1)]
    epsilon: Annotated[float, Range(gt=0)]  # tau in the paper


class FedAdagrad(FedAdam):
    """Step along Adagrad's direction of the mean update D.

    m := b1 m + (1 - b1) D and v := v + D^2. W := W + eta_g m / (sqrt(v) + eps). A round without replies changes nothing.

    Source: Reddi et al. 2021, Algorithm 2. v starts at eps^2.
    """

    paper = FedAdam.paper
    linear_in_updates = True

    def second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """Return v, the sum of all D^2."""
        return before + square
