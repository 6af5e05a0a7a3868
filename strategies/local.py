"""Local (also SOLO), the server half: counts rounds and averages nothing."""

from dataclasses import dataclass

from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """No hyper-parameters."""


class Local(FederatedStrategy):
    """The server's model stays as it began; nobody uses it."""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the model as it is."""
        return model
