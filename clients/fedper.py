"""FedPer, the node half: share the body, keep the head, train both together (METHODS section 15)."""

from dataclasses import dataclass
from typing import Any, Literal

from clients.base import PARTS, Client
from clients.training.stack import LocalWork

# What stays on the node, by name.
HEADS = {"classifier": ("classifier",), "projector_classifier": ("projector", "classifier")}


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half."""

    local: LocalWork
    head: Literal["classifier", "projector_classifier"]


class FedPerClient(Client):
    """Cross-entropy over body and personal head together. Source: Arivazhagan et al. 2019."""

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Everything but the head travels."""
        return tuple(part for part in PARTS if part not in HEADS[config.head])
