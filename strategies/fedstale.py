"""FedStale's strategy: between FedAvg's fresh updates and FedVARP's stale ones."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.strategies.fedavg import Weights
from contrafed.strategies.fedvarp import FedVARP


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    stale_weight: Annotated[float, Range(ge=0, le=1)]  # beta


class FedStale(FedVARP):
    """Step W += eta_g v, with v = (1 - beta) mean over S of Delta_k + beta (FedVARP's v).

    That is v = mean over S of (Delta_k - beta y_k) + beta mean over all of y, with y_k the client's last update. beta = 0 is
    FedAvg with equal weights, and beta = 1 is FedVARP.

    Source: Rodio and Neglia 2024, abstract: a convex combination of fresh and stale updates that interpolates between the two.
    The authors' code has this step, with the terms of S divided by participation rates.

    Deviation: the mean over S is that of our FedAvg and FedVARP. It is not divided by participation rates.
    """

    paper = Paper(
        authors="Rodio and Neglia",
        title="FedStale: leveraging stale client updates in federated learning",
        where="arXiv, 2024",
        url="https://arxiv.org/abs/2405.04171",
    )

    @property
    def stale_weight(self) -> float:
        """The factor on y (beta)."""
        return float(self.config.stale_weight)
