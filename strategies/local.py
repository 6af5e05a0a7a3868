"""Local's (also SOLO's) strategy: count rounds and average nothing."""

from dataclasses import dataclass

from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """No hyper-parameters."""


class Local(FederatedStrategy):
    """Leave the server's model unchanged and unused."""

    @classmethod
    def needs_individual_updates(cls, config: Config) -> str:
        """Return nothing, because there are no replies."""
        return ""

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the model as it is."""
        return model
