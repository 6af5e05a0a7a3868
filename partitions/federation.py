"""A data set and who holds which part of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.errors import UserError
from partitions.images import ImageData, load_images
from partitions.own import fitted, own_images
from partitions.partition import Partition, make_partition


@dataclass(frozen=True)
class Federation:
    """The images, and each node's index arrays into them."""

    data: ImageData
    partition: Partition

    @property
    def num_nodes(self) -> int:
        """How many nodes there are (K)."""
        return self.partition.num_nodes

    @property
    def central_test(self) -> np.ndarray:
        """Indices of the central test split; empty when the splits were merged."""
        return np.flatnonzero(self.data.test.numpy())


def load_federation(settings: Mapping[str, Any], own: tuple[int, str] | None = None) -> Federation:
    """Load and partition what ``settings`` (keys dataset, partition, num_nodes, seed) describe. Raises ``UserError``.

    On a device ``settings["images"]`` says what the run's model takes, and ``own`` which node has data of its own, and where.
    """
    if own is not None:
        return Federation(*own_images(settings, *own))
    if "images" in settings and settings["partition"]["name"] == "own":
        raise UserError("this run has partition=own: every --node-config needs data=PATH")
    data = load_images(settings["dataset"])
    if "images" in settings:
        data = fitted(data, settings["images"], f"dataset={settings['dataset']['name']} on this node")
    merged = bool(settings["dataset"]["merge_splits"])
    return Federation(data, make_partition(settings["partition"], data, settings["num_nodes"], settings["seed"], merged))
