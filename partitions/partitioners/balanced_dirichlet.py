"""balanced_dirichlet: label skew by a Dirichlet draw per node, all nodes of exactly the same size (FedRCL)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.schema import Range
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    alpha: Annotated[float, Range(gt=0)]


# Sizes are what they are: redrawing cannot make a node larger.
RANDOM_SIZES = False


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts of floor(n / K) examples (FedRCL).

    Node by node, q ~ Dir(alpha 1_C), then so many of the examples that are left without replacement, each weighted by q of
    its class; the last nodes get what is left.
    """
    size = len(draw.y) // draw.num_nodes
    left = np.arange(len(draw.y))
    parts = []
    for _ in range(draw.num_nodes):
        q = draw.rng.dirichlet(np.full(draw.num_classes, config.alpha))
        # The n smallest E_i / q_i, E_i exponential, are a weighted draw without replacement; logarithms bear a tiny q.
        keys = np.log(draw.rng.exponential(size=len(left))) - np.log(np.maximum(q, 1e-300))[draw.y[left]]
        order = np.argpartition(keys, size - 1) if size < len(left) else np.arange(len(left))
        parts.append(left[order[:size]])
        left = left[np.sort(order[size:])]
    return parts
