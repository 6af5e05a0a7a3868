"""FedProc, the server half: FedAvg's mean, global prototypes, and the share of cross-entropy that grows round by round."""

import torch

from contrafed.server.base import Replies, Tensors
from contrafed.server.prototypes import Prototypes
from contrafed.strategies.fedavg import FedAvg
from contrafed.strategies.fedavg import Weights as Config

__all__ = ["Config", "FedProc"]


class FedProc(FedAvg):
    """W = sum_k (n_k / n) w_k; P_c the pooled mean over nodes' own prototypes; a_t = (t - 1) / T in round t of T planned.

    As long as no class has a prototype, a_t = 1: cross-entropy alone. Source: Mu et al. 2023, Algorithm 1. Deviations: its
    code averages over all nodes' data, which shrinks the model where some are away; here over the participants. A class that
    nobody held keeps its prototype.
    """

    averages = True

    def setup(self) -> None:
        """Start with an empty table."""
        self.prototypes = Prototypes(self.state, self.down)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the model, the prototypes and a_t."""
        known = bool(self.state["valid"].any())
        # Nodes that train before they are judged do the next round's work.
        done = self.round.server_round if self.round.judging else self.round.server_round - 1
        mix = done / self.num_rounds if known else 1.0
        return super().broadcast(model) | self.prototypes.broadcast() | {"mix/weight": torch.tensor(mix)}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average models and prototypes."""
        self.prototypes.merge(replies, "class_count")
        return self.mean(model, replies)
