"""FedAvg, the node half: plain local training of the whole model."""

from contrafed.training.base import Client, Config

__all__ = ["Config", "FedAvgClient"]


class FedAvgClient(Client):
    """Cross-entropy on the node's own data; nothing is remembered. Source: McMahan et al. 2017, Algorithm 1."""
