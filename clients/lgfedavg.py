"""LG-FedAvg's client: keep the body and share the head, the opposite of FedPer."""

from typing import Any

from contrafed.clients.fedper import HEADS, Config
from contrafed.core.paper import Paper
from contrafed.training.base import Client

__all__ = ["Config", "LGFedAvgClient"]


class LGFedAvgClient(Client):
    """Minimise cross-entropy over the personal body and the shared head together.

    Source: Liang et al. 2020, Algorithm 1.
    """

    family = "personal, parts of the model"
    paper = Paper(
        authors="Liang, Liu, Liu, Allen, Auerbach, Brent, Salakhutdinov and Morency",
        title="Think Locally, Act Globally: Federated Learning with Local and Global Representations",
        where="arXiv, 2020",
        url="https://arxiv.org/abs/2001.01523",
    )

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Return the parts of the head."""
        return HEADS[config.head]
