"""iid: a shuffled data set cut into equal parts."""

from dataclasses import dataclass

import numpy as np

from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition: those that all have."""


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts whose sizes differ by at most one."""
    return np.array_split(draw.rng.permutation(len(draw.y)), draw.num_nodes)


# Another draw has the same sizes, so redrawing for larger nodes is pointless.
RANDOM_SIZES = False
