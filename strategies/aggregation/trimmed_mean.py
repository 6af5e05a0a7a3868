"""The mean of every number without its smallest and largest values, without client weights."""

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
    """Average each coordinate without its floor(beta m) smallest and largest values.

    Source: Yin et al. 2018, with Flower's arithmetic.
    """

    by_coordinate = True

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the trimmed means."""
        # Flower cuts int(share * m) at each end. A quarter of a reply more guards against rounding down.
        cut = (share_of(self.config.trim, len(changes)) + 0.25) / len(changes)
        return by_flower(aggregate_trimmed_avg, changes, weights, cut)
