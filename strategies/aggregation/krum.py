"""Krum and Multi-Krum: the replies whose nearest neighbours are nearest."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from flwr.server.strategy.aggregate import aggregate_krum

from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.server.aggregation import Aggregation, by_flower, share_of


@dataclass(frozen=True)
class Config:
    """Settings of Krum."""

    assumed: Annotated[float, Range(ge=0, lt=0.5)]  # f/m
    keep: Annotated[float, Range(gt=0, le=1)] | None  # the share of replies that are averaged. None: one reply


class Krum(Aggregation):
    """Take the reply with the smallest sum of squared distances to its m - f - 2 nearest others, or the mean of several.

    There is at least one such other. f = floor(m ``assumed``) of m replies may attack. The mean of Multi-Krum (``keep``) is by
    weight.

    Source: Blanchard et al. 2017, with Flower's arithmetic.
    """

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return the selected update, or the mean of the selected ones."""
        count, keep = len(changes), self.config.keep
        kept = 0 if keep is None else max(1, share_of(keep, count))
        return by_flower(aggregate_krum, changes, weights, share_of(self.config.assumed, count), kept)
