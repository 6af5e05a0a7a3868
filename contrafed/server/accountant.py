"""Compute how much differential privacy a run has spent, with Google's dp-accounting from the extra ``dp``."""

import importlib.util
import logging
import math
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.privacy.gaussian import Gaussian

PACKAGE = "dp_accounting"

# Of a summary, if privacy.seeded_noise=true: from the seed the noise could be drawn again.
SEED_IS_SECRET = "holds only while the seed is secret"


def needs_accountant() -> None:
    """Raise ``UserError`` if the accountant is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise UserError("privacy: the package dp-accounting is missing. Fix: pip install dp-accounting")


class Budget:
    """The privacy cost of a run's rounds for the client that was selected most often.

    For a selected client a round costs one Gaussian mechanism of ``noise_multiplier`` for each of the ``kinds`` of uploaded
    tensors. It costs other clients nothing. With amplification every round costs every client one mechanism sampled with the
    clients' probability: a Poisson-sampled Gaussian. Rounds compose by Renyi differential privacy. So add-or-remove here means
    that a client sent zeros instead.
    """

    def __init__(self, config: Gaussian, kinds: int, num_clients: int, probability: float | None) -> None:
        """Start with no rounds.

        Args:
            config: Settings of the noise.
            kinds: Number of kinds of uploaded tensors.
            num_clients: K.
            probability: Each client's participation probability, if epsilon depends on it.
        """
        self.config, self.kinds, self.probability = config, kinds, probability
        self.asked = np.zeros(num_clients, dtype=np.int64)
        self.rounds = 0

    def pass_round(self, participants: np.ndarray) -> None:
        """Count a round with this cohort."""
        self.asked[participants] += 1
        self.rounds += 1

    @property
    def releases(self) -> int:
        """The number of mechanisms for the client that was selected most often."""
        return self.rounds if self.probability is not None else int(self.asked.max())

    def about(self) -> dict[str, Any]:
        """Return the entries of a run's summary."""
        about = {"epsilon": self.epsilon(), "delta": self.config.delta, "privacy_rounds": self.releases}
        return about | ({"epsilon_condition": SEED_IS_SECRET} if self.config.seeded_noise else {})

    def epsilon(self) -> float:
        """Return epsilon at the configuration's delta. It is infinite without noise."""
        if not self.releases:
            return 0.0
        if not self.config.noise_multiplier:
            return math.inf
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant

        # It would warn about every order that it leaves out.
        logging.getLogger("absl").setLevel(logging.ERROR)
        # Several mechanisms of one round on the same client equal one with less noise.
        event: Any = dp_accounting.GaussianDpEvent(self.config.noise_multiplier / math.sqrt(self.kinds))
        if self.probability is not None:
            event = dp_accounting.PoissonSampledDpEvent(self.probability, event)
        return float(RdpAccountant().compose(event, self.releases).get_epsilon(self.config.delta))
