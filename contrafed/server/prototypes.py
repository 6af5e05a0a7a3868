"""Keep the table of global prototypes, for the strategies that have one."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from contrafed.core.tensors import Tensors
from contrafed.server.replies import Replies

Weighting = Literal["class_count", "plain", "data"]


class Prototypes:
    """Class means (C, D), and which classes any client has had so far (C,). A strategy has one and calls its two methods."""

    def __init__(self, state: dict[str, Any], broadcast_spec: Mapping[str, tuple[int, ...]]) -> None:
        """Start empty, in the shapes that clients receive (``broadcast_spec``). The tensors are in the strategy's ``state``."""
        self.state = state
        state["means"] = torch.zeros(broadcast_spec["proto/mean"])
        state["valid"] = torch.zeros(broadcast_spec["proto/valid"])

    def broadcast(self) -> Tensors:
        """Return the part of the broadcast that holds the table."""
        return {"proto/mean": self.state["means"], "proto/valid": self.state["valid"]}

    def merge(self, replies: Replies, weighting: Weighting) -> None:
        """Replace the prototype of every class in the replies by the mean over its holders, summed in float64.

        An aggregation other than the mean combines the uploads of each class's holders. A class without holders keeps its last
        prototype. With ``class_count`` holders are weighted by their examples of the class, which is the pooled mean (FedCRL
        Equation 6). With ``plain`` they are weighted equally (MpFedcon Equation 4), and with ``data`` by their examples of all
        classes.
        """
        counts = torch.stack([reply.tensors["proto/count"] for reply in replies]).double()  # (m, C)
        examples = torch.from_numpy(replies.num_examples).to(counts).unsqueeze(1)
        counts = counts.clamp_min(0).minimum(examples)  # a client cannot have more examples of a class than in total
        held = counts > 0
        weights = {
            "class_count": counts,
            "plain": held.double(),
            "data": held * examples,
        }[weighting]
        present = held.any(0)
        pooled, old = replies.class_means(weights), self.state["means"]
        self.state["means"] = torch.where(present.unsqueeze(1), pooled, old.to(pooled)).to(old.dtype)
        self.state["valid"] = torch.maximum(self.state["valid"], present.to(self.state["valid"]))
