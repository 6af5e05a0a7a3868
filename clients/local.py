"""Local (also SOLO), the node half: every node trains its own model; nothing travels."""

from contrafed.training.base import Client, Config

__all__ = ["Config", "LocalClient"]


class LocalClient(Client):
    """Cross-entropy on the node's own data, from the common initial model on; a node trains in the rounds it takes part in."""

    family = "personal, a whole model"
    shared = ()
