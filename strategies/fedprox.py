"""FedProx, the server half: FedAvg's."""

from strategies.fedavg import Config, FedAvg

__all__ = ["Config", "FedProx"]


class FedProx(FedAvg):
    """The mean of the participants' models; what sets the method apart is in ``clients/fedprox.py``."""
