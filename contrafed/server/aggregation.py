"""Define the base class of aggregations, and call Flower's array functions for some of them."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.tensors import Tensors, on_host


class Aggregation:
    """Replaces the mean of the clients' updates."""

    # Whether each number is combined by itself. Others compare whole updates. Counters of BatchNorm would weigh most there.
    by_coordinate: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def combine(self, changes: Sequence[Tensors], weights: np.ndarray) -> Tensors:
        """Return one combined update in float64.

        Args:
            changes: At least one update, all with the same names and shapes.
            weights: (m,), sum to 1.
        """
        raise NotImplementedError


def make_aggregation(choice: Choice) -> Aggregation | None:
    """Return the chosen aggregation, None for the plain mean."""
    return None if choice.name == "mean" else registry.only_subclass(choice.module, Aggregation)(choice.config)


def share_of(share: float, count: int) -> int:
    """Return floor(share * count) of the decimal number: 0.29 of 100 is 29, although in binary it is 28.999."""
    return int(round(share * count, 9))


def by_flower(function: Callable[..., list[np.ndarray]], changes: Sequence[Tensors], weights: np.ndarray, *how: Any) -> Tensors:
    """Apply one of Flower's functions of arrays to updates, in double precision."""
    first = changes[0]
    results: list[tuple[list[np.ndarray], Any]] = [  # of each reply its arrays and its weight
        ([tensor.double().numpy() for tensor in on_host(change).values()], weight)
        for change, weight in zip(changes, weights.tolist(), strict=True)
    ]
    found = function(results, *how)
    return {n: torch.as_tensor(array).to(like.device) for (n, like), array in zip(first.items(), found, strict=True)}
