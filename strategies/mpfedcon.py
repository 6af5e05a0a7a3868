"""MpFedcon, the server half: the mean of the base encoders, and of the class centres."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from contrafed.server.base import FederatedStrategy, Replies, Reply, Tensors
from contrafed.server.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the server half."""

    centre_weights: Literal["class_count", "plain", "data"]
    centre_memory: Literal["round", "bank"]


class MpFedcon(FederatedStrategy):
    """theta = sum_k (n_k / n) theta_k (Algorithm 1, line 29); centres per class over their holders (line 30).

    ``class_count`` (default) is the exact pooled mean, ``plain`` Equation 4, ``data`` line 30 without its extra 1/n, which
    would shrink every centre. Source: Li et al. 2022 (doi:10.1051/wujns/2022276508). Deviation: a class nobody held this round
    keeps its centre. ``centre_memory: bank`` pools the latest centres of every node that ever took part, as section 4.2's
    memory bank and Equation 4's sum over all parties.
    """

    averages = True

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """Encoders and centres are summed, but for a bank of single ones."""
        return "keeps every node's latest centres" if config.centre_memory == "bank" else ""

    def setup(self) -> None:
        """Start with an empty table; a class centre is a prototype."""
        self.centres = Prototypes(self.state, self.down)
        if self.config.centre_memory == "bank":
            self.state["bank"] = {}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the base encoder and the centres."""
        return super().broadcast(model) | self.centres.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average encoders (line 29) and centres (line 30)."""
        self.centres.merge(self._known(replies), self.config.centre_weights)
        return replies.mean("model", replies.num_examples)

    def _known(self, replies: Replies) -> Replies:
        """Return the replies whose centres count: this round's, or each node's latest."""
        if self.config.centre_memory == "round":
            return replies
        bank: dict[int, Tensors] = self.state["bank"]
        for reply in replies:
            # Copies: a reply may be a view of memory that holds many of them.
            centres = {n: v.clone() for n, v in reply.tensors.items() if n.startswith("proto/")}
            bank[reply.node] = centres | {"examples": torch.tensor(reply.num_examples)}
        known = (Reply(node, latest, int(latest["examples"]), {}) for node, latest in bank.items())
        return Replies(known, replies.aggregation)
