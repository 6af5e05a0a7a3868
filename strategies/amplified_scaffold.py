"""Amplified SCAFFOLD's strategy: the steps of a period are amplified, and c changes at its end."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from contrafed.core.schema import Range
from contrafed.server.base import Replies, Tensors
from contrafed.strategies.scaffold import Scaffold


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    period: Annotated[int, Range(ge=1)]  # P, in rounds
    amplification: Annotated[float, Range(ge=1)]  # gamma


class AmplifiedScaffold(Scaffold):
    """Average in every round. After every P rounds set W to V + gamma (W - V), with V the model after the last such round.

    c then becomes the mean of all clients' c_k. Those of the period's participants are new. Before the first such round V is
    the initial model. With P = 1 and gamma = 1 it is SCAFFOLD.

    Source: Crawshaw and Liu 2024, by the authors' code.

    Deviation: the clients upload the changes of their c_k round by round, and c takes their sum at the period's end. A lost
    reply leaves out its own change. A last round of a period without enough replies ends the period in the next round.
    """

    aggregates_empty_rounds = True

    def setup(self) -> None:
        """Start with c = 0."""
        super().setup()
        zeros = {name: torch.zeros_like(value) for name, value in self.state["control"].items()}
        self.state |= {"pending": zeros, "anchor": {}, "period": 0}

    def broadcast(self, model: Tensors) -> Tensors:
        """Return W, c and the number of the period, from 0."""
        return super().broadcast(model) | {"period/number": torch.tensor(float(self.state["period"]))}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Average, add up the changes of c_k, and end the period if this is its last round."""
        self.state["anchor"] = self.state["anchor"] or dict(model)
        if len(replies):
            equal_weights = np.ones(len(replies))
            change = replies.weighted_sum("control_delta", equal_weights / self.population.num_clients_with_data)
            mean_delta = replies.mean("delta", equal_weights)
            self.state["pending"] = {n: (v + change[n]).to(model[n].dtype) for n, v in self.state["pending"].items()}
            model = model | {n: (model[n] + delta).to(model[n].dtype) for n, delta in mean_delta.items()}
        if self.round.server_round >= (self.state["period"] + 1) * self.config.period:
            model = self.end_period(model)
        return model

    def end_period(self, model: Tensors) -> Tensors:
        """Amplify the steps since the last period's end, and add the changes of c_k to c."""
        state = self.state
        model = {n: v + self.config.amplification * (model[n] - v) for n, v in state["anchor"].items()}
        state["control"] = {n: c + state["pending"][n] for n, c in state["control"].items()}
        state["pending"] = {n: torch.zeros_like(c) for n, c in state["control"].items()}
        state["anchor"], state["period"] = model, self.round.server_round // self.config.period
        return model
