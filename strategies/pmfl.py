"""PMFL's strategy: weights by participation interval, and a mixture (psi) with older global models."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.schema import OnlyWith, Range
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.base import Replies, Tensors
from contrafed.server.intervals import Intervals
from contrafed.strategies.fedavg import FedAvg, Weights

# Of keys that only adaptive weights or the history read.
AWC, HGM = OnlyWith("adaptive_weights"), OnlyWith("history_size")


@dataclass(frozen=True)
class Config(Weights):
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # eta_g
    adaptive_weights: bool  # AWC. false: the ablation w/o AWC
    cutoff: Annotated[int, Range(ge=1), AWC]  # C
    interval_lag: Annotated[bool, AWC]  # FedAU's weights: the interval that ends now counts from the next participation on
    normalize: Annotated[Literal["all_clients", "participants", "weights", "none"], AWC]  # divisor of the weighted sum
    history_size: Annotated[int, Range(ge=0)]  # H, with the current model. 0 or 1: the ablation w/o HGM
    history_step: Annotated[Literal["mixed", "outside", "unmixed"], HGM]  # where the next round's step starts
    history_share: Annotated[Literal["falling", "rising"] | Annotated[float, Range(ge=0, le=1)], HGM]  # psi
    history_warmup: Annotated[Literal["available", "wait", "pad"], HGM]  # while fewer than H - 1 older models exist
    sign: Literal["descend", "paper"]  # paper: the minus that Equations 9 and 10 print


class PMFL(FedAvg):
    """Take a step U, weighted by participation intervals, and mix it with the older global models.

    U = W + (eta_g / K) sum_k x_k Delta_k. W' = (1 - psi_t) U + psi_t mean(the last H - 1 older global models). x_k is the mean
    participation interval of client k (AWC). K is the number of all clients. psi_t = 1/2 - t / (2 (T - 1)) for t = 0 .. T-1.

    With ``history_step=mixed`` (default, as printed) the next round steps from W'. With ``unmixed`` it steps from U, and older
    models are older U: W' is only what clients receive and what is evaluated. With ``outside`` psi scales W alone, not the sum
    of the updates. ``history_share=rising`` makes psi_t = t / (2 (T - 1)).

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
        """Step by the intervals' weights, and mix in the older global models (Algorithm 2)."""
        mean_intervals, sample_weights = self.intervals.tick(replies.clients), self.sample_weights(replies)
        # x_k. With weights=samples it is multiplied by n_k / mean n.
        weights = mean_intervals * sample_weights if self.config.adaptive_weights else sample_weights
        self.round.client_metrics["weight"] = (replies.clients, weights)
        current = {name: model[name] for name in self.shared_names}
        start = self.state.get("unmixed") or current
        terms, factors = [start], [1.0]
        if len(replies):  # U = W + (eta_g / K) sum_k x_k Delta_k
            rate = self.config.server_lr * (1 if self.config.sign == "descend" else -1)
            step_sizes = weights * rate / self._compute_divisor(weights, sample_weights)
            deltas, delta_factors = replies.weighted_terms("delta", step_sizes)
            terms, factors = terms + deltas, factors + delta_factors
        if self.config.history_step == "unmixed":
            terms, factors = [weighted_sum(terms, factors)], [1.0]
            self.state["unmixed"] = terms[0]
        older = self._get_older_models(start)
        psi = self._compute_psi(len(older))
        if psi > 0:  # (1 - psi) U + psi mean(older), in one sum
            outside = self.config.history_step == "outside"
            factors = [(1 - psi) * factors[0], *(factor if outside else (1 - psi) * factor for factor in factors[1:])]
            terms, factors = terms + older, factors + [psi / len(older)] * len(older)
        self.state["history"] = [start, *self.state["history"]][: self._num_older]
        return weighted_sum(terms, factors)

    def client_weights(self) -> np.ndarray:
        """Return every client's weight: x_k, with ``weights=samples`` times n_k / mean n."""
        sample_weights = self.shares_of(self.population.sizes)
        return self.intervals.weights * sample_weights if self.config.adaptive_weights else sample_weights

    def _compute_divisor(self, weights: np.ndarray, sample_weights: np.ndarray) -> float:
        """Return the divisor of the weighted sum, which is the number of participants without AWC."""
        return {
            "all_clients": float(self.population.num_clients_with_data),
            "participants": float(sample_weights.sum()),
            "weights": float(weights.sum()),
            "none": 1.0,
        }[self.config.normalize if self.config.adaptive_weights else "participants"]

    @property
    def _num_older(self) -> int:
        """The number of older global models to mix in, H - 1."""
        return max(self.config.history_size - 1, 0)

    def _get_older_models(self, model: Tensors) -> list[Tensors]:
        """Return the older global models, newest first. ``history_warmup=pad`` repeats the oldest or ``model`` up to H - 1."""
        older: list[Tensors] = self.state["history"]
        if self.config.history_warmup == "pad":
            older = older + [older[-1] if older else model] * (self._num_older - len(older))
        return older

    def _compute_psi(self, num_models: int) -> float:
        """Return psi_t, and 0 while there are too few older models (``num_models``)."""
        needed = self._num_older if self.config.history_warmup == "wait" else 1
        share = self.config.history_share
        if not self._num_older or num_models < needed:
            return 0.0
        if not isinstance(share, str):
            return share
        if self.num_rounds == 1:
            return 0.0
        rising = (self.round.server_round - 1) / (2 * (self.num_rounds - 1))
        return rising if share == "rising" else 0.5 - rising
