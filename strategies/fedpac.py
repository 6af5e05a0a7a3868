"""FedPAC's strategy: the mean of bodies and prototypes, and for every client a mixture of the heads."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch

from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import Prototypes
from contrafed.strategies.simplex import minimize_on_simplex


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    cut: Annotated[float, Range(ge=0, lt=1)]  # shares of a mixture below this are dropped


class FedPAC(FederatedStrategy):
    """Average bodies and prototypes, and mix a head for every participant.

    phi = sum_k (n_k / n) phi_k. P_c is the mean by class count. head_i = sum_j a_ij pi_j over this round's participants.

    a_i minimises a' (diag(v) + G_i) a on the simplex, with G_i[j, l] = <h_i - h_j, h_i - h_l> over all classes. As in the
    authors' code, shares below ``cut`` are dropped and the rest is divided by its sum. Without a solution or any share left,
    the client keeps its own head. The metric ``own_head`` counts these clients. Absent clients keep their last mixture.

    Source: Xu et al. 2023, Equation 9.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: each client has its own mixture."""
        return "mixes single heads for every client"

    def setup(self) -> None:
        """Start with an empty table and no mixed heads."""
        self.prototypes = Prototypes(self.state, self.broadcast_spec)
        self.state["heads"] = {}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return body, prototypes, and a head that is marked invalid."""
        nothing = {n: torch.zeros(s) for n, s in self.broadcast_spec.items() if n.startswith("head/")}
        return super().broadcast(model) | self.prototypes.broadcast() | nothing

    def per_client_broadcast(self, model: Tensors, client: int, evaluating: bool) -> Tensors | None:
        """Return the client's mixed head, if there is one."""
        head = self.state["heads"].get(client)
        return None if head is None else add_prefix("head", head) | {"head/valid": torch.ones(())}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average bodies and prototypes, and mix a head for every participant."""
        self.prototypes.merge(replies, "class_count")
        heads, shares = replies.get_tensors("head"), self.mixtures(replies)
        for client, share in zip(replies.clients.tolist(), shares, strict=True):
            if share is None:
                self.state["heads"].pop(client, None)  # the client's own head
            else:
                mixed = weighted_sum(heads, share.tolist())
                self.state["heads"][client] = {n: v.to(heads[0][n].dtype) for n, v in mixed.items()}
        self.round.metrics["own_head"] = float(sum(share is None for share in shares))
        return model | replies.mean("model", replies.num_examples)

    def mixtures(self, replies: Replies) -> list[np.ndarray | None]:
        """Return every participant's shares a_i (m,) of the participants' heads, or None without a solution."""
        h = torch.stack([reply.tensors["stat/h"].double().flatten() for reply in replies]).cpu().numpy()
        v = np.array([max(float(reply.tensors["stat/v"]), 0.0) for reply in replies])  # a variance, by a device's report
        shares: list[np.ndarray | None] = []
        for i in range(len(replies)):
            apart = h[i] - h
            share = minimize_on_simplex(np.diag(v) + apart @ apart.T)
            if share is not None:
                share = np.where(share < self.config.cut, 0.0, share)
                share = share / share.sum() if share.any() else None
            shares.append(share)
        return shares
