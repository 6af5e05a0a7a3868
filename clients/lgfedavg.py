"""LG-FedAvg, the node half: the opposite of FedPer, the body stays and the head is shared."""

from clients.base import Client, Config

__all__ = ["Config", "LGFedAvgClient"]


class LGFedAvgClient(Client):
    """Cross-entropy over personal body and shared classifier together. Source: Liang et al. 2020."""

    shared = ("classifier",)
