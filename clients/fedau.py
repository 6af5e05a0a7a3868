"""FedAU, the node half: FedAvg's local training, sent as a change (METHODS section 27)."""

from clients.base import Client, Config

__all__ = ["Config", "FedAUClient"]


class FedAUClient(Client):
    """Cross-entropy on the node's own data; sends Delta = w_end - W. Source: Wang and Ji 2024, Algorithm 1."""

    upload = "delta"
