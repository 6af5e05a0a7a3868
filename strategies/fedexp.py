"""FedExP, a server rule: the more the updates disagree, the longer the server's step."""

from dataclasses import dataclass
from typing import Annotated, Any

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.weighted_sum import combine
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the server half; the paper's symbol beside each."""

    epsilon: Annotated[float, Range(ge=0)]


class FedExP(FedAvg):
    """W += eta_g D, D = sum_k p_k Delta_k, eta_g = max(1, sum_k p_k |Delta_k|^2 / (2 (|D|^2 + epsilon))), p_k summing to 1.

    Source: Jhunjhunwala et al. 2023, Equation 6, with the authors' p_k: examples over the participants' (``weights``). What
    is judged, and left at the end, is the mean of the last two models. Deviation: the authors' code multiplies epsilon by the
    number of participants and lets it decay as the square of the learning rate. A round without replies changes nothing.
    """

    family = "the server's rule"
    paper = Paper(
        authors="Jhunjhunwala, Wang and Joshi",
        title="FedExP: Speeding Up Federated Averaging via Extrapolation",
        where="ICLR 2023",
        url="https://arxiv.org/abs/2301.09604",
    )

    @classmethod
    def single_replies(cls, config: Any) -> str:
        """The step is as long as single updates are apart."""
        return "measures how far single updates are apart"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Step along the mean update, farther where the updates differ; remember where from."""
        shares, deltas = self.shares(replies), replies.deltas()
        weights = (shares / shares.sum()).tolist()
        mean = combine(deltas, weights)
        spread = sum(weight * square(delta) for weight, delta in zip(weights, deltas, strict=True))
        length = 2 * (square(mean) + self.config.epsilon)
        rate = max(1.0, spread / length) if length else 1.0
        self.round.metrics["server_lr"] = rate
        self.state["last"] = {name: model[name] for name in mean}
        return {name: model[name] + rate * step for name, step in mean.items()}

    def judged(self, model: Tensors) -> Tensors:
        """The mean of the last two models: steps that are too long in one direction cancel out there."""
        last = self.state.get("last", {})
        return model | {name: (model[name] + value.to(model[name])) / 2 for name, value in last.items()}

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return what is judged."""
        return self.broadcast(self.judged(model))


def square(tensors: Tensors) -> float:
    """Return the squared L2 norm of all tensors together."""
    return sum(float(value.double().square().sum()) for value in tensors.values())
