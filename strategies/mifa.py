"""MIFA's strategy: the mean of every client's last update, of absent clients too."""

from dataclasses import dataclass
from typing import Annotated, Any

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.server.latest_updates import LatestUpdates
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g


class MIFA(FedAvg):
    """Set G_k := Delta_k / eta_t for k in S, and step W += eta_g eta_t (1/K) sum over all of G.

    eta_t is the clients' learning rate in this round. A round without replies moves W as well. With ``weights=samples`` Delta_k
    is multiplied by n_k over the mean of all n.

    Source: Gu et al. 2021, Algorithm 1, where G points uphill.

    Deviation: G starts at 0, while the paper waits until every client has participated once.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Gu, Huang, Zhang and Huang",
        title="Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
        where="NeurIPS 2021",
        url="https://arxiv.org/abs/2106.04159",
    )
    aggregates_empty_rounds = True

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the table has every client's own update."""
        return "keeps every client's last update"

    def setup(self) -> None:
        """Start with an empty table of updates."""
        self.table = LatestUpdates(self.state, self.population.num_clients_with_data)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Store the participants' updates, and step along the mean of all."""
        rate = self.rate(self.round.server_round)
        for client, delta, share in zip(replies.clients.tolist(), replies.deltas(), self.sample_weights(replies), strict=True):
            self.table.replace(client, {name: value * (share / rate) for name, value in delta.items()})
        step = self.config.server_lr * rate
        return {name: model[name] + step * mean for name, mean in self.table.mean.items()}
