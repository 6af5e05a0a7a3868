"""How much differential privacy a run has spent, by Google's dp-accounting, which the extra ``dp`` brings."""

import importlib.util
import logging
import math
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.privacy.gaussian import Gaussian

PACKAGE = "dp_accounting"


def needs_accountant() -> None:
    """Raise ``UserError`` where the accountant is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("privacy: the package dp-accounting is missing. Fix: pip install 'contrafed[dp]'")


class Budget:
    """What a run's rounds have cost the node that was asked most often.

    One round costs a node that is asked to train one Gaussian mechanism of ``noise_multiplier`` for each of the ``kinds`` of
    tensors that it sends, any other node nothing. With amplification every round costs every node one mechanism sampled with
    the nodes' probability: a Poisson-sampled Gaussian. Rounds compose by Renyi differential privacy, and so add-or-remove
    here means that a node sent zeros instead.
    """

    def __init__(self, config: Gaussian, kinds: int, num_nodes: int, probability: float | None) -> None:
        """``probability``: with which each node takes part, where epsilon counts on it."""
        self.config, self.kinds, self.probability = config, kinds, probability
        self.asked = np.zeros(num_nodes, dtype=np.int64)
        self.rounds = 0

    def pass_round(self, participants: np.ndarray) -> None:
        """Count a round in which these nodes were asked to train."""
        self.asked[participants] += 1
        self.rounds += 1

    @property
    def releases(self) -> int:
        """How many mechanisms the node that was asked most often has been through."""
        return self.rounds if self.probability is not None else int(self.asked.max())

    def about(self) -> dict[str, Any]:
        """Return what a run's summary says of it."""
        return {"epsilon": self.epsilon(), "delta": self.config.delta, "privacy_rounds": self.releases}

    def epsilon(self) -> float:
        """Return epsilon at the configuration's delta; infinity without noise."""
        if not self.releases:
            return 0.0
        if not self.config.noise_multiplier:
            return math.inf
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        # It tells of every order that it leaves out.
        logging.getLogger("absl").setLevel(logging.ERROR)
        # Mechanisms of one round on the same node are one with less noise.
        event: Any = dp_accounting.GaussianDpEvent(self.config.noise_multiplier / math.sqrt(self.kinds))
        if self.probability is not None:
            event = dp_accounting.PoissonSampledDpEvent(self.probability, event)
        return float(RdpAccountant().compose(event, self.releases).get_epsilon(self.config.delta))
