"""Moon, the server half: FedAvg's."""

from strategies.fedavg import Config, FedAvg

__all__ = ["Config", "Moon"]


class Moon(FedAvg):
    """The mean of the participants' models; what sets the method apart is in ``clients/moon.py``."""
