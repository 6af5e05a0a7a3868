"""FedAGM's strategy: clients start from a look-ahead model along the server's momentum."""

from dataclasses import dataclass
from typing import Annotated

from contrafed.core.paper import Paper
from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_momentum: Annotated[float, Range(ge=0, lt=1)]  # rho


class FedAGM(FedAvg):
    """Broadcast W + rho m, and take the mean of the trained models.

    W := mean w_k, and m := rho m + mean w_k - (W + rho m). W is evaluated. A round without replies changes nothing. The
    clients' pull b |w - (W + rho m)|^2 is ``local.proximal_weight`` = 2 b.

    Source: Kim et al. 2022 (FedACG).
    """

    family = "aggregation on the server"
    paper = Paper(
        authors="Kim, Kim and Han",
        title="Communication-Efficient Federated Learning with Accelerated Client Gradient",
        where="CVPR 2024",
        url="https://arxiv.org/abs/2201.03172",
    )
    linear_in_updates = True
    reply_weights = FedAvg.reply_weights

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the look-ahead model."""
        return add_prefix("model", {name: value.to(model[name].dtype) for name, value in self._ahead(model).items()})

    def broadcast_for_evaluation(self, model: Tensors) -> Tensors:
        """Return the model itself."""
        return super().broadcast(model)

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Return the mean, and add its difference from the look-ahead model to the momentum."""
        ahead, mean, rho = self._ahead(model), self.mean(model, replies), self.config.server_momentum
        momentum = self.state.setdefault("momentum", {})
        for name in self.shared_names:
            momentum[name] = rho * momentum.get(name, 0) + mean[name] - ahead[name]
        return mean

    def _ahead(self, model: Tensors) -> Tensors:
        momentum, rho = self.state.get("momentum", {}), self.config.server_momentum
        return {name: model[name].double() + rho * momentum.get(name, 0) for name in self.shared_names}
