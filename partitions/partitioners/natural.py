"""natural: one client for each owner of the data, such as FEMNIST's writers."""

from dataclasses import dataclass

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings that all partitions have."""


# partition.deal_test deals each owner's test examples to its client.
CLIENTS_ARE_OWNERS = True


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return the examples of ``num_clients`` random owners.

    Raises:
        UserError: If the data have no owners, or too few.
    """
    if draw.owner is None:
        raise UserError("partition=natural: the examples have no owners. Fix: dataset=femnist, or another partition")
    owners = np.unique(draw.owner)
    if draw.num_clients > len(owners):
        count = len(owners)
        raise UserError(
            f"num_clients={draw.num_clients}: the data have {count} natural clients. Fix: num_clients={count} or fewer"
        )
    chosen = draw.rng.choice(owners, draw.num_clients, replace=False)
    order = np.argsort(draw.owner, kind="stable")
    starts = np.searchsorted(draw.owner[order], chosen, side="left")
    ends = np.searchsorted(draw.owner[order], chosen, side="right")
    return [order[a:b] for a, b in zip(starts, ends, strict=True)]
