"""FedAWE, a server rule: nodes go on from their own last model, and long absences count in the length of the step."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import named
from contrafed.core.weighted_sum import combine
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the server half; the paper's symbol beside each."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g


class FedAWE(FedAvg):
    """y_k = x_k + eta_g (t - tau_k) (w_k - x_k) for k in S;  x_k := mean over S of y for those in S, the others keep theirs.

    x_k is what node k works from, tau_k the last round in which it was active, 0 before its first: a node that was away
    neither returns to the newest model nor loses the weight of the rounds it missed. W, which is judged, is the last active
    nodes' mean. Source: Xiang et al. 2024, Algorithm 1. So x_k is the W of round tau_k: the server keeps those models
    that some node still goes on from, up to K, and sends it, where in the paper the node does; a node whose reply fails was
    not active. A round without replies changes nothing but the time. With ``weights=samples`` the mean is by examples.
    """

    family = "the server's rule"
    paper = Paper(
        authors="Xiang, Ioannidis, Yeh, Joe-Wong and Su",
        title="Efficient Federated Learning against Heterogeneous and Non-stationary Client Unavailability",
        where="NeurIPS 2024",
        url="https://arxiv.org/abs/2409.17446",
    )

    def setup(self) -> None:
        """No node was ever active: all go on from the initial model."""
        self.state["active"] = np.zeros(self.population.num_nodes, dtype=np.int64)  # tau_k
        self.state["models"] = {}  # the W that active nodes left with, by round

    def download(self, model: Tensors, node: int, judging: bool) -> Tensors | None:
        """Return x_k for training; None where it is W, which everybody receives, and for a node that never trains."""
        active = self.state["active"]
        if (judging and not self.post_train) or active[node] == active.max() or not self.population.sizes[node]:
            return None
        return named("model", self.state["models"][int(active[node])])

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """The mean of the participants' stretched steps."""
        models, active, now = self.state["models"], self.state["active"], self.round.server_round
        travelling = {name: model[name] for name in self.travelling}
        models.setdefault(0, travelling)
        away, shares = now - active[replies.nodes], self.shares(replies)  # t - tau_k
        self.round.node_metrics["weight"] = (replies.nodes, away.astype(np.float64))
        weights = shares / shares.sum()
        begun = [reply.begun(travelling) for reply in replies]  # x_k
        steps, lengths = replies.terms("delta", weights * self.config.server_lr * away)
        mean = combine(begun + steps, weights.tolist() + lengths)
        models[now] = {name: value.to(model[name].dtype) for name, value in mean.items()}
        active[replies.nodes] = now
        needed = set(active[self.population.sizes > 0].tolist())
        self.state["models"] = {when: kept for when, kept in models.items() if when in needed}
        return mean
