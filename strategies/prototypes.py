"""The global prototype table that FedProto, MpFedcon, FedCRL and FedCoSR keep on the server."""

from typing import Literal

import torch

from strategies.base import FederatedStrategy, Replies, Tensors


class PrototypeStrategy(FederatedStrategy):
    """A strategy that also averages class prototypes: per class over its holders; a class nobody held keeps its last one.

    ``weighting``: ``class_count`` by each holder's examples of the class, which is the pooled mean (FedCRL Equation 6);
    ``plain`` equally (MpFedcon Equation 4); ``data`` by the holder's examples of all classes.
    """

    weighting: Literal["class_count", "plain", "data"] = "class_count"

    def setup(self) -> None:
        """Start with an empty table: means (C, D) and validity (C,)."""
        self.state["means"] = torch.zeros(self.down["proto/mean"])
        self.state["valid"] = torch.zeros(self.down["proto/valid"])

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the shared tensors and the table."""
        return super().broadcast(model) | {"proto/mean": self.state["means"], "proto/valid": self.state["valid"]}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Merge the prototypes, and average by training examples what of the model travels."""
        self.merge_prototypes(replies)
        return model | replies.mean("model", replies.num_examples) if len(replies) else model

    def merge_prototypes(self, replies: Replies) -> None:
        """Replace the prototype of every class that a reply holds; sums in float64."""
        if not len(replies):
            return
        counts = torch.stack([reply.tensors["proto/count"] for reply in replies]).double()  # (m, C)
        means = torch.stack([reply.tensors["proto/mean"] for reply in replies]).double()  # (m, C, D)
        held = counts > 0
        weights = {
            "class_count": counts,
            "plain": held.double(),
            "data": held * torch.from_numpy(replies.num_examples).to(counts).unsqueeze(1),
        }[self.weighting]
        present = held.any(0)
        pooled = torch.einsum("mc,mcd->cd", weights, means) / weights.sum(0).clamp_min(1e-300).unsqueeze(1)
        old = self.state["means"]
        self.state["means"] = torch.where(present.unsqueeze(1), pooled, old.to(pooled)).to(old.dtype)
        self.state["valid"] = torch.maximum(self.state["valid"], present.to(self.state["valid"]))
