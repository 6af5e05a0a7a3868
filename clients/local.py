"""Local's (also SOLO's) client: every client trains its own model and shares nothing."""

from contrafed.training.base import Client, Config

__all__ = ["Config", "LocalClient"]


class LocalClient(Client):
    """Minimise cross-entropy on the client's own data, starting from the common initial model.

    A client trains only in rounds with its participation.
    """

    family = "personal, all layers"
    shared = ()
