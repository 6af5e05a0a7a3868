"""SCAFFOLD's strategy: the mean step and the mean control variate."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from contrafed.core.schema import Range
from contrafed.core.tensors import add_prefix
from contrafed.server.base import FederatedStrategy, Replies, Tensors


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g


class Scaffold(FederatedStrategy):
    """Step W += eta_g mean Delta over the participants, and c += (1/N) sum of the changes of c_k.

    N is the number of all clients. If no reply is lost, c is the mean of all clients' c_k under any participation. A lost reply
    leaves out the client's own change of c_k.

    Source: Karimireddy et al. 2020, Algorithm 1, with its plain mean.
    """

    def setup(self) -> None:
        """Start with c = 0."""
        self.state["control"] = {name: torch.zeros(self.broadcast_spec[f"control/{name}"]) for name in self.shared_names}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return W and c."""
        return super().broadcast(model) | add_prefix("control", self.state["control"])

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Step, and update c."""
        equal_weights = np.ones(len(replies))
        mean_delta = replies.mean("delta", equal_weights)
        new_model = {name: value + self.config.server_lr * mean_delta[name] for name, value in model.items()}
        c_change = replies.weighted_sum("control_delta", equal_weights / self.population.num_clients_with_data)
        self.state["control"] = {n: (c + c_change[n]).to(model[n].dtype) for n, c in self.state["control"].items()}
        return new_model
