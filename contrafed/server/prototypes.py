"""The table of global prototypes, for the rules that keep one."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from contrafed.core.tensors import Tensors
from contrafed.server.replies import Replies

Weighting = Literal["class_count", "plain", "data"]


class Prototypes:
    """Class means (C, D) and which classes anybody has ever held (C,); a rule keeps one and calls its two methods."""

    def __init__(self, state: dict[str, Any], down: Mapping[str, tuple[int, ...]]) -> None:
        """Start empty, in the shapes that nodes receive (``down``). The tensors live in the rule's ``state``."""
        self.state = state
        state["means"] = torch.zeros(down["proto/mean"])
        state["valid"] = torch.zeros(down["proto/valid"])

    def broadcast(self) -> Tensors:
        """Return what nodes receive of the table."""
        return {"proto/mean": self.state["means"], "proto/valid": self.state["valid"]}

    def merge(self, replies: Replies, weighting: Weighting) -> None:
        """Replace the prototype of every class that a reply holds by the mean over its holders, summed in float64.

        An aggregation other than the mean combines what each class's holders sent. A class that nobody holds keeps its last
        prototype. ``class_count`` weights holders by their examples of the class, which is the pooled mean (FedCRL Equation
        6); ``plain`` equally (MpFedcon Equation 4); ``data`` by their examples of all classes.
        """
        counts = torch.stack([reply.tensors["proto/count"] for reply in replies]).double()  # (m, C)
        examples = torch.from_numpy(replies.num_examples).to(counts).unsqueeze(1)
        counts = counts.clamp_min(0).minimum(examples)  # of no class does a node hold more than it holds
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
