"""PMFL's strategy: weights by participation interval, and a share of the historical global models."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.schema import Range
from contrafed.core.weighted_sum import combine
from contrafed.server.base import Replies, Tensors
from contrafed.server.intervals import Intervals
from contrafed.strategies.fedavg import FedAvg, Weights


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    adaptive_weights: bool  # AWC. false: the ablation w/o AWC
    cutoff: Annotated[int, Range(ge=1)]  # C
    interval_lag: bool  # FedAU's weights: the interval that ends now counts from the next participation on
    normalize: Literal["all_clients", "participants", "weights", "none"]  # divisor of the weighted sum
    history_size: Annotated[int, Range(ge=0)]  # H, with the current model. 0 or 1: the ablation w/o HGM
    history_warmup: Literal["available", "wait", "pad"]  # while fewer than H - 1 older models exist
    sign: Literal["descend", "paper"]  # paper: the minus that Equations 9 and 10 print


class PMFL(FedAvg):
    """Take a step U, weighted by participation intervals, and mix it with the older global models.

    U = W + (eta_g / K) sum_k x_k Delta_k. W' = (1 - psi_t) U + psi_t mean(the last H - 1 older global models). x_k is the mean
    participation interval of client k (AWC). K is the number of all clients. psi_t = 1/2 - t / (2 (T - 1)) for t = 0 .. T-1.

    Without AWC every x_k is 1 and the sum is divided by the number of participants. This is FedAvg's step. With
    ``weights=samples`` x_k is multiplied by n_k over the mean of all n.

    Source: Zhang et al. 2026 (arXiv:2602.11945), Equations 8-11 and Algorithm 2.

    Deviation: the sign is plus, since Delta points downhill. Equation 9 prints a minus. The sum has a factor 1/K. Without it
    the printed step is about K times too long.
    """

    aggregates_empty_rounds = True

    def setup(self) -> None:
        """Start every client's interval, with an empty history."""
        self.intervals = Intervals(self.population.num_clients, self.config.cutoff, self.config.interval_lag, self.state)
        self.state["history"] = []  # older global models, newest first

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Mix the weighted step with the history, and advance both."""
        lengths, shares = self.intervals.tick(replies.clients), self.sample_weights(replies)
        weights = lengths * shares if self.config.adaptive_weights else shares  # x_k
        self.round.client_metrics["weight"] = (replies.clients, weights)
        current = {name: model[name] for name in self.shared_names}
        models, factors = [current], [1.0]
        if len(replies):  # U = W + (eta_g / K) sum_k x_k Delta_k
            rate = self.config.server_lr * (1 if self.config.sign == "descend" else -1)
            changes, scales = replies.weighted_terms("delta", weights * rate / self._divisor(weights, shares))
            models, factors = models + changes, factors + scales
        psi, older = self._history(current)
        if psi > 0:  # (1 - psi) U + psi mean(older)
            factors = [(1 - psi) * factor for factor in factors] + [psi / len(older)] * len(older)
            models += older
        return combine(models, factors)

    def client_weights(self) -> np.ndarray:
        """Return x_k of every client."""
        shares = self.shares_of(self.population.sizes)
        return self.intervals.weights * shares if self.config.adaptive_weights else shares

    def _divisor(self, weights: np.ndarray, shares: np.ndarray) -> float:
        """Return the divisor of the weighted sum, which is the number of participants without AWC."""
        return {
            "all_clients": float(self.population.num_holders),
            "participants": float(shares.sum()),
            "weights": float(weights.sum()),
            "none": 1.0,
        }[self.config.normalize if self.config.adaptive_weights else "participants"]

    def _history(self, model: Tensors) -> tuple[float, list[Tensors]]:
        """Return psi_t and the older global models, newest first, and store ``model`` as the newest."""
        older, wanted = self.state["history"], self.config.history_size - 1
        if wanted < 1:
            return 0.0, []
        self.state["history"] = [model, *older][:wanted]
        if self.config.history_warmup == "pad":
            older = older + [older[-1] if older else model] * (wanted - len(older))
        ready = len(older) >= (wanted if self.config.history_warmup == "wait" else 1)
        last = max(self.num_rounds - 1, 1)
        psi = 0.5 - (self.round.server_round - 1) / (2 * last) if self.num_rounds > 1 else 0.0
        return psi if ready else 0.0, older
