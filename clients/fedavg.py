"""FedAvg's client: plain local training of the whole model."""

from contrafed.core.paper import Paper
from contrafed.training.base import Client, Config

__all__ = ["Config", "FedAvgClient"]


class FedAvgClient(Client):
    """Minimise the cross-entropy on the client's own data, without client state.

    Source: McMahan et al. 2017, Algorithm 1.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="McMahan, Moore, Ramage, Hampson and Agüera y Arcas",
        title="Communication-Efficient Learning of Deep Networks from Decentralized Data",
        where="AISTATS 2017",
        url="https://arxiv.org/abs/1602.05629",
    )
