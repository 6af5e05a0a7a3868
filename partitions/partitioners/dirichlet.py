"""dirichlet: label skew by a Dirichlet draw per client (PMFL) or per class (FedCRL), with unequal sizes."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.schema import Range
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    alpha: Annotated[float, Range(gt=0)]
    scheme: Literal["per_client", "per_class"]


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts of unequal size (PMFL, and FedCRL's practical setting)."""
    members = draw.by_class()
    if config.scheme == "per_client":
        shares = draw.rng.dirichlet(np.full(len(members), config.alpha), draw.num_clients)  # (K, C), D_k
        # A tiny alpha can underflow to a column of zeros. Deal that class evenly.
        totals = shares.sum(0)
        shares = np.where(totals > 0, shares / np.where(totals > 0, totals, 1), 1 / draw.num_clients)
        return _deal(members, shares.T, draw.num_clients)
    capacity = len(draw.y) / draw.num_clients
    held = np.zeros(draw.num_clients)
    rows = []
    for examples in members:
        room = held < capacity
        share = draw.rng.dirichlet(np.full(draw.num_clients, config.alpha)) * room
        # Without a share every client is full, or only clients whose share underflowed have room.
        share = share / share.sum() if share.sum() > 0 else room / max(room.sum(), 1)
        rows.append(share)
        held += np.diff(_cuts(share, len(examples)))
    return _deal(members, np.array(rows), draw.num_clients)


def _cuts(share: np.ndarray, count: int) -> np.ndarray:
    """Return K+1 positions that cut ``count`` examples by rounded cumulative shares."""
    ends = np.rint(np.cumsum(share) * count).astype(np.int64)
    ends[-1] = count
    return np.concatenate([[0], ends])


def _deal(members: list[np.ndarray], shares: np.ndarray, num_clients: int) -> list[np.ndarray]:
    """Deal each class's examples by its row of ``shares`` (C, K)."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(num_clients)]
    for examples, share in zip(members, shares, strict=True):
        cuts = _cuts(share, len(examples))
        for client in np.flatnonzero(np.diff(cuts)):
            pieces[client].append(examples[cuts[client] : cuts[client + 1]])
    return [np.concatenate(piece) if piece else np.zeros(0, dtype=np.int64) for piece in pieces]
