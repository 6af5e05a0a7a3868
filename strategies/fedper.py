"""FedPer, the server half: FedAvg's, over the part of the model that travels."""

from strategies.fedavg import Config, FedAvg

__all__ = ["Config", "FedPer"]


class FedPer(FedAvg):
    """The mean of the participants' shared tensors; what sets the method apart is in ``clients/fedper.py``."""
