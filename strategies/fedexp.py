"""FedExP's strategy: take longer steps when the updates disagree more."""

from dataclasses import dataclass
from typing import Annotated, Any

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    epsilon: Annotated[float, Range(ge=0)]


class FedExP(FedAvg):
    """Step W += eta_g D, with D = sum_k p_k Delta_k.

    eta_g = max(1, sum_k p_k |Delta_k|^2 / (2 (|D|^2 + epsilon))), and the p_k sum to 1. The mean of the last two models is
    evaluated, and it is the final model. A round without replies changes nothing.

    Source: Jhunjhunwala et al. 2023, Equation 6. As in the authors' code, p_k is the client's share of the participants'
    examples (``weights``).

    Deviation: the authors' code multiplies epsilon by the number of participants. There epsilon also decays as the square of
    the learning rate.
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Jhunjhunwala, Wang and Joshi",
        title="FedExP: Speeding Up Federated Averaging via Extrapolation",
        where="ICLR 2023",
        url="https://arxiv.org/abs/2301.09604",
    )

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the step's length depends on their distances."""
        return "measures how far single updates are apart"

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Step along the mean update, with a larger rate for larger differences, and keep the previous model."""
        shares, deltas = self.sample_weights(replies), replies.deltas()
        weights = (shares / shares.sum()).tolist()
        mean = weighted_sum(deltas, weights)
        spread = sum(weight * square(delta) for weight, delta in zip(weights, deltas, strict=True))
        length = 2 * (square(mean) + self.config.epsilon)
        rate = max(1.0, spread / length) if length else 1.0
        self.round.metrics["server_lr"] = rate
        self.state["last"] = {name: model[name] for name in mean}
        return {name: model[name] + rate * step for name, step in mean.items()}

    def eval_model(self, model: Tensors) -> Tensors:
        """Return the mean of the last two models, where steps that are too long in one direction cancel out."""
        last = self.state.get("last", {})
        return model | {name: (model[name] + value.to(model[name])) / 2 for name, value in last.items()}

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return the model that is evaluated."""
        return self.broadcast(self.eval_model(model))


def square(tensors: Tensors) -> float:
    """Return the squared L2 norm of all tensors together."""
    return sum(float(value.double().square().sum()) for value in tensors.values())
