"""iid: a shuffled data set in equal parts."""

from dataclasses import dataclass

import numpy as np

from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings that all partitions have."""


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts whose sizes differ by at most one."""
    return np.array_split(draw.rng.permutation(len(draw.y)), draw.num_clients)


# Another draw cannot make a client larger.
RANDOM_SIZES = False
