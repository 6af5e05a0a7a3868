"""FedVARP's strategy: use each client's last update to reduce the variance of partial participation."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.base import Replies, Tensors
from contrafed.server.latest_updates import LatestUpdates
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g


class FedVARP(FedAvg):
    """Step W += eta_g v, with v = mean over S of (Delta_k - y_k) + mean over all of y.

    Then y_k := Delta_k for k in S. y starts at 0. A round without replies changes nothing. With ``weights=samples`` Delta_k is
    multiplied by n_k over the mean of all n.

    Source: Jhunjhunwala et al. 2022, Algorithm 1.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Jhunjhunwala, Sharma, Nagarkatti and Joshi",
        title="FedVARP: Tackling the Variance Due to Partial Client Participation in Federated Learning",
        where="UAI 2022",
        url="https://arxiv.org/abs/2207.14130",
    )

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the table has every client's own update."""
        return "keeps every client's last update"

    def setup(self) -> None:
        """Start with an empty table of updates."""
        self.table = LatestUpdates(self.state, self.population.num_clients_with_data)

    @property
    def stale_weight(self) -> float:
        """The factor on y, 1 here."""
        return 1.0

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the corrected step, and store the participants' updates."""
        before, changes, stale = self.table.mean, list[Tensors](), self.stale_weight
        for client, delta, share in zip(replies.clients.tolist(), replies.deltas(), self.sample_weights(replies), strict=True):
            last = self.table.latest(client)
            change = self.table.replace(client, {name: value * share for name, value in delta.items()})
            changes.append({n: v + (1 - stale) * last[n] for n, v in change.items()} if last and stale != 1 else change)
        change = weighted_sum(changes, np.full(len(changes), 1 / len(changes)).tolist())
        return {n: model[n] + self.config.server_lr * (value + stale * before.get(n, 0)) for n, value in change.items()}
