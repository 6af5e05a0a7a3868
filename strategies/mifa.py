"""MIFA, a server rule: the mean of every node's last update, whoever is away."""

from dataclasses import dataclass
from typing import Annotated, Any

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.server.client_table import Table
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the server half; the paper's symbol beside each."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g


class MIFA(FedAvg):
    """G_k := Delta_k / eta_t for k in S;  W += eta_g eta_t (1/K) sum over all of G, eta_t the nodes' rate in this round.

    Source: Gu et al. 2021, Algorithm 1 (there G points uphill). A round without replies moves W as well. Deviation: G = 0 at
    first, where the paper waits until every node has taken part once. With ``weights=samples`` Delta_k is multiplied by n_k
    over the mean of all n.
    """

    family = "the server's rule"
    paper = Paper(
        authors="Gu, Huang, Zhang and Huang",
        title="Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
        where="NeurIPS 2021",
        url="https://arxiv.org/abs/2106.04159",
    )
    idle = True

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """The table has every node's own update."""
        return "keeps every node's last update"

    def setup(self) -> None:
        """Start with no update known."""
        self.table = Table(self.state, self.population.num_holders)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Remember the participants' updates, and step along the mean of all."""
        rate = self.rate(self.round.server_round)
        for node, delta, share in zip(replies.nodes.tolist(), replies.deltas(), self.shares(replies), strict=True):
            self.table.replace(node, {name: value * (share / rate) for name, value in delta.items()})
        step = self.config.server_lr * rate
        return {name: model[name] + step * mean for name, mean in self.table.mean.items()}
