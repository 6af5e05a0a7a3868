"""The median of every number, without client weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.server.strategy.aggregate import aggregate_median

from contrafed.core.tensors import Tensors
from contrafed.server.aggregation import Aggregation, by_flower


@dataclass(frozen=True)
class Config:
    """No settings."""


class Median(Aggregation):
    """Take the coordinate-wise median.

    Source: Yin et al. 2018, with Flower's arithmetic.
    """

    by_coordinate = True

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the medians. For an even number of replies they are the mean of the middle two."""
        return by_flower(aggregate_median, changes, weights)
