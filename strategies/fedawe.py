"""FedAWE's strategy: clients continue from their own last model, and long absences lengthen their step."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.base import Replies, Tensors
from contrafed.server.replies import norm
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    clip_norm: Annotated[float | None, Range(gt=0)]  # of the mean step


class FedAWE(FedAvg):
    """Set x_k to the mean over S of y, with y_k = x_k + eta_g (t - tau_k) (w_k - x_k), for all k in S.

    Clients outside S keep their x_k. Client k starts from x_k. tau_k is the last round of its participation, and 0 before the
    first. An absent client later continues from its old model, and its longer step makes up for the missed rounds. W is the
    last participants' mean, and it is evaluated. A round without replies changes only the time. With ``weights=samples`` the
    mean is by examples.

    Source: Xiang et al. 2024, Algorithm 1.

    Interpretation: x_k is the W of round tau_k. A client whose reply fails did not participate.

    Deviation: the server stores the up to K models that clients continue from, and sends them. In the paper clients store them.
    As in the authors' code, the mean of (t - tau_k) (w_k - x_k) is clipped to ``clip_norm``. The paper has no clipping.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Xiang, Ioannidis, Yeh, Joe-Wong and Su",
        title="Efficient Federated Learning against Heterogeneous and Non-stationary Client Unavailability",
        where="NeurIPS 2024",
        url="https://arxiv.org/abs/2409.17446",
    )

    def setup(self) -> None:
        """Start without participations, so that all clients continue from the initial model."""
        self.state["active"] = np.zeros(self.population.num_clients, dtype=np.int64)  # tau_k
        self.state["models"] = {}  # by round: the W after it

    def per_client_broadcast(self, model: Tensors, client: int, evaluating: bool) -> Tensors | None:
        """Return x_k for training.

        None for a client whose x_k is W, which all clients receive, and for a client that never trains.
        """
        active = self.state["active"]
        if (evaluating and not self.after_training) or active[client] == active.max() or not self.population.sizes[client]:
            return None
        return add_prefix("model", self.state["models"][int(active[client])])

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the mean of the participants' lengthened steps."""
        models, active, now = self.state["models"], self.state["active"], self.round.server_round
        shared = {name: model[name] for name in self.shared_names}
        models.setdefault(0, shared)
        away, shares = now - active[replies.clients], self.sample_weights(replies)  # t - tau_k
        self.round.client_metrics["weight"] = (replies.clients, shares * away)
        weights = shares / shares.sum()
        begun = [reply.start_model(shared) for reply in replies]  # x_k
        steps, lengths = replies.weighted_terms("delta", weights * self.config.server_lr * away)
        if steps and (limit := self.config.clip_norm) is not None:
            step = weighted_sum(steps, lengths)
            steps, lengths = [step], [min(1.0, self.config.server_lr * limit / max(norm(step.values()), 1e-300))]
        mean = weighted_sum(begun + steps, weights.tolist() + lengths)
        models[now] = {name: value.to(model[name].dtype) for name, value in mean.items()}
        active[replies.clients] = now
        needed = set(active[self.population.sizes > 0].tolist())
        self.state["models"] = {when: kept for when, kept in models.items() if when in needed}
        return mean
