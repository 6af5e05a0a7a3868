"""FedProc's strategy: FedAvg's mean, global prototypes, and a share of cross-entropy that grows over rounds."""

import torch

from contrafed.server.base import Replies, Tensors
from contrafed.server.prototypes import Prototypes
from contrafed.strategies.fedavg import FedAvg
from contrafed.strategies.fedavg import Weights as Config

__all__ = ["Config", "FedProc"]


class FedProc(FedAvg):
    """Average models and prototypes, and broadcast the share a_t of cross-entropy.

    W = sum_k (n_k / n) w_k. P_c is the pooled mean of the clients' own prototypes. a_t = (t - 1) / T in round t of T planned
    rounds. While no class has a prototype, a_t = 1 (cross-entropy alone).

    Source: Mu et al. 2023, Algorithm 1.

    Deviation: the average is over the participants. The authors' code averages over all clients' data, which shrinks the model
    if some are absent. A class without a holder in this round keeps its prototype.
    """

    linear_in_updates = True

    def setup(self) -> None:
        """Start with an empty table of prototypes."""
        self.prototypes = Prototypes(self.state, self.broadcast_spec)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the model, the prototypes and a_t."""
        known = bool(self.state["valid"].any())
        # Clients that train before their evaluation run the next round's local training.
        done = self.round.server_round if self.round.evaluating else self.round.server_round - 1
        mix = done / self.num_rounds if known else 1.0
        return super().broadcast(model) | self.prototypes.broadcast() | {"mix/weight": torch.tensor(mix)}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average models and prototypes."""
        self.prototypes.merge(replies, "class_count")
        return self.mean(model, replies)
