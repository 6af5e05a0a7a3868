"""Treat clients that are the owners of the data: count them, and deal each its owner's test examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.images import ImageData


@dataclass(frozen=True)
class OwnerCounts:
    """How many owners are clients, and how many of the training examples they have."""

    clients: int
    owners: int
    drawn: int  # training examples of the clients, before they cut test and validation parts from them
    examples: int  # training examples of all owners


def count_owners(owner: np.ndarray | None, drawn: Sequence[np.ndarray]) -> OwnerCounts | None:
    """Return the counts of owners and clients, None for data without owners.

    Args:
        owner: The owner of each training example (n,).
        drawn: Each client's positions among the training examples.
    """
    return None if owner is None else OwnerCounts(len(drawn), len(np.unique(owner)), sum(map(len, drawn)), len(owner))


def deal_by_owner(drawn: list[np.ndarray], parts: list[np.ndarray], data: ImageData) -> list[np.ndarray]:
    """Give each client its owner's examples of the central test split. Raises ``UserError`` if no client has any.

    Args:
        drawn: Each client's positions among the training examples, all of one owner, before any is moved to another client.
        parts: Each client's part, empty for a dropped client.
        data: The data.
    """
    test, owner = np.flatnonzero(data.test.numpy()), data.owner
    assert owner is not None  # the partition has drawn owners
    trained = owner[~data.held_out.numpy()]
    dealt = [test[(owner[test] == trained[own[0]]) & bool(len(part))] for own, part in zip(drawn, parts, strict=True)]
    if not any(map(len, dealt)):
        fix = "Fix: dataset.merge_splits=true, so that each client has a test part of its own"
        raise UserError(f"partition.deal_test: no owner of the test split is a client. {fix}")
    return dealt
