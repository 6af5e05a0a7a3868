"""MpFedcon's strategy: the mean of the base encoders, and of the class centres."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from contrafed.server.base import FederatedStrategy, Replies, Reply, Tensors
from contrafed.server.prototypes import Prototypes


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    centre_weights: Literal["class_count", "plain", "data"]
    centre_memory: Literal["round", "bank"]


class MpFedcon(FederatedStrategy):
    """Average the base encoders by examples, and the centres of each class over its holders.

    Encoders: theta = sum_k (n_k / n) theta_k (Algorithm 1, line 29). Centres: line 30.

    Source: Li et al. 2022 (doi:10.1051/wujns/2022276508).

    Interpretation: the key ``centre_weights`` selects the mean of centres. By default (``class_count``) it is the exact pooled
    mean. Equation 4 is ``plain``. Line 30 is ``data``, without its extra factor 1/n, which would shrink every centre. With
    ``centre_memory: bank`` the latest centres of all past participants are averaged. This is section 4.2's memory bank and
    Equation 4's sum over all parties.

    Deviation: a class without a holder in this round keeps its centre.
    """

    linear_in_updates = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: a bank stores them. Otherwise encoders and centres are summed."""
        return "keeps every client's latest centres" if config.centre_memory == "bank" else ""

    def setup(self) -> None:
        """Start with an empty table. A class centre is a prototype."""
        self.centres = Prototypes(self.state, self.broadcast_spec)
        if self.config.centre_memory == "bank":
            self.state["bank"] = {}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the base encoder and the centres."""
        return super().broadcast(model) | self.centres.broadcast()

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average encoders (line 29) and centres (line 30)."""
        self.centres.merge(self._collect_centres(replies), self.config.centre_weights)
        return replies.mean("model", replies.num_examples)

    def _collect_centres(self, replies: Replies) -> Replies:
        """Return the replies whose centres are averaged: this round's, or each client's latest."""
        if self.config.centre_memory == "round":
            return replies
        bank: dict[int, Tensors] = self.state["bank"]
        for reply in replies:
            # Copy, since a reply may be a view of a buffer of many replies.
            centres = {n: v.clone() for n, v in reply.tensors.items() if n.startswith("proto/")}
            bank[reply.client] = centres | {"examples": torch.tensor(reply.num_examples)}
        known = (Reply(client, latest, int(latest["examples"]), {}) for client, latest in bank.items())
        return Replies(known, replies.aggregation)
