"""The mean of every number without its smallest and largest, whatever nodes weigh."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from flwr.server.strategy.aggregate import aggregate_trimmed_avg

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.server.aggregation import Aggregation, by_flower, share_of


@dataclass(frozen=True)
class Config:
    """Settings of the trimmed mean."""

    trim: Annotated[float, Range(ge=0, lt=0.5)]  # beta


class TrimmedMean(Aggregation):
    """The coordinate-wise mean without the floor(beta m) smallest and largest. Source: Yin et al. 2018; Flower's arithmetic."""

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the trimmed means."""
        # Flower cuts int(share * m) at each end: a quarter of a reply more is none more, and no rounding error fewer.
        cut = (share_of(self.config.trim, len(changes)) + 0.25) / len(changes)
        return by_flower(aggregate_trimmed_avg, changes, weights, cut)
