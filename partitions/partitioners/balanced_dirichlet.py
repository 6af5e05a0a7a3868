"""balanced_dirichlet: label skew by a Dirichlet draw per client, with equal sizes of all clients (FedRCL)."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.core.schema import Range
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    alpha: Annotated[float, Range(gt=0)]


REVISION = 2  # since examples are in ascending order
# Another draw cannot make a client larger.
RANDOM_SIZES = False


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts of floor(n / K) examples (FedRCL).

    Each client in turn draws q ~ Dir(alpha 1_C). It then draws its examples without replacement from those left. Each is
    weighted by q of its class. The last clients get the remaining examples.
    """
    size = len(draw.y) // draw.num_clients
    left = np.arange(len(draw.y))
    parts = []
    for _ in range(draw.num_clients):
        q = draw.rng.dirichlet(np.full(draw.num_classes, config.alpha))
        # The n smallest E_i / q_i with exponential E_i are such a weighted draw. Logarithms allow a tiny q.
        keys = np.log(draw.rng.exponential(size=len(left))) - np.log(np.maximum(q, 1e-300))[draw.y[left]]
        order = np.argpartition(keys, size - 1) if size < len(left) else np.arange(len(left))
        parts.append(left[np.sort(order[:size])])  # argpartition's own order depends on the processor
        left = left[np.sort(order[size:])]
    return parts
