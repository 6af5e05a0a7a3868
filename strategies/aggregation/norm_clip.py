"""The mean of updates with bounded length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.aggregation import Aggregation
from contrafed.server.replies import norm


@dataclass(frozen=True)
class Config:
    """Settings of the clip."""

    bound: Annotated[float, Range(gt=0)] | None  # M. None: the median length of the round's updates


class NormClip(Aggregation):
    """Average the clipped updates: sum_k p_k Delta_k min(1, M / |Delta_k|).

    Source: Sun et al. 2019.

    Deviation: the median as default of M is this project's.
    """

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the mean of the clipped updates."""
        lengths = np.array([norm(change.values()) for change in changes])
        bound = float(np.median(lengths)) if self.config.bound is None else self.config.bound
        factors = np.minimum(1.0, np.divide(bound, lengths, out=np.ones_like(lengths), where=lengths > 0))
        return weighted_sum(changes, (weights * factors).tolist())
