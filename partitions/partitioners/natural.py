"""natural: one client for each owner of the data, such as FEMNIST's writers."""

from dataclasses import dataclass

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings that all partitions have."""


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return the examples of ``num_nodes`` random owners.

    Raises:
        UserError: If the data have no owners, or too few.
    """
    if draw.owner is None:
        raise UserError("partition=natural needs data that say who each example comes from, such as dataset=femnist, not drawn")
    owners = np.unique(draw.owner)
    if draw.num_nodes > len(owners):
        raise UserError(f"num_nodes={draw.num_nodes} is more than the {len(owners)} natural nodes of the data set")
    chosen = draw.rng.choice(owners, draw.num_nodes, replace=False)
    order = np.argsort(draw.owner, kind="stable")
    starts = np.searchsorted(draw.owner[order], chosen, side="left")
    ends = np.searchsorted(draw.owner[order], chosen, side="right")
    return [order[a:b] for a, b in zip(starts, ends, strict=True)]
