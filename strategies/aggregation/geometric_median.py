"""The geometric median: the point with the smallest sum of distances to all replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.core.weighted_sum import squared_distance, weighted_sum
from contrafed.server.aggregation import Aggregation


@dataclass(frozen=True)
class Config:
    """Settings of the geometric median."""

    iterations: Annotated[int, Range(ge=1)]  # R
    smoothing: Annotated[float, Range(gt=0)]  # nu, the lower bound of distances


class GeometricMedian(Aggregation):
    """Minimise sum_k p_k |v - Delta_k| over v with smoothed Weiszfeld steps, starting from the mean.

    v := sum_k b_k Delta_k / sum_k b_k, with b_k = p_k / max(nu, |v - Delta_k|).

    Source: Pillutla et al. 2022 (RFA), Algorithm 2.
    """

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the point after the configured number of steps."""
        found = weighted_sum(changes, weights.tolist())
        for _ in range(self.config.iterations):
            away = np.array([squared_distance(found, change) ** 0.5 for change in changes])
            nearer = weights / np.maximum(self.config.smoothing, away)
            found = weighted_sum(changes, (nearer / nearer.sum()).tolist())
        return found
