"""Hold a data set together with its partition over the clients."""

from dataclasses import dataclass

import numpy as np

from contrafed.core.client_run import ClientRun
from contrafed.core.errors import UserError
from contrafed.data.images import ImageData, load_images
from contrafed.data.label_flip import Flipped, flip_labels
from contrafed.data.own import adapt_to_run, own_images
from contrafed.data.partition import Partition, make_partition
from contrafed.data.shifted_partition import ShiftedPartition


@dataclass(frozen=True)
class Federation:
    """The images, and each client's index arrays into them."""

    data: ImageData
    partition: Partition

    @property
    def num_clients(self) -> int:
        """The number of clients (K)."""
        return self.partition.num_clients

    def labels(self, index: np.ndarray) -> np.ndarray:
        """Return the labels (n,) of positions in parts of this federation (n,)."""
        return self.data.y.numpy()[index % max(len(self.data.y), 1)]

    @property
    def central_test(self) -> np.ndarray:
        """Indices of the central test split, empty if the splits were merged."""
        return np.flatnonzero(self.data.test.numpy())

    @property
    def central_validation(self) -> np.ndarray:
        """Indices of the central validation split, empty without one."""
        return np.flatnonzero(self.data.validation.numpy()) if self.data.validation is not None else np.zeros(0, dtype=np.int64)


def load_federation(run: ClientRun, own: tuple[int, str] | None = None) -> Federation:
    """Load and partition the data of a run.

    Args:
        run: The client's part of the configuration. On a device its ``images`` describe the model's input.
        own: On a device with its own data: the client's partition id, and the path.

    Raises:
        UserError: For data that are missing or that do not fit.
    """
    if own is not None:
        return Federation(*own_images(run, *own))
    if run.images is not None and run.partition.name == "own":
        raise UserError("this run has partition=own: every --node-config needs data=PATH")
    data = load_images(run.dataset)
    if run.images is not None:
        data = adapt_to_run(data, run.images, f"dataset={run.dataset.name} on this client")
    merged = run.dataset.config.merge_splits
    partition = make_partition(run.partition, data, run.num_clients, run.seed_of_federation, merged)
    if run.flipped:
        data, partition = flip_labels(data, partition, run.flipped)
    if (shift := run.partition.config.feature_shift).kind != "none":
        originals = partition.originals if isinstance(partition, Flipped) else np.arange(len(data.y))
        partition = ShiftedPartition(partition, originals, shift, run.seed_of_federation)
    return Federation(data, partition)
