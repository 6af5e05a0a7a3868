"""Give some clients wrong training labels: the simulated attack label_flip."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from contrafed.data.images import ImageData
from contrafed.data.partition import Partition


class Flipped(Partition):
    """A partition with wrong labels for some clients. Its sizes and class counts stay the true ones.

    So the participation does not depend on which clients attack.
    """

    def __init__(self, true: Partition, own: dict[int, np.ndarray], originals: np.ndarray) -> None:
        """Replace the training examples of some clients.

        Args:
            true: The original partition.
            own: The replaced training examples, by client.
            originals: For each position (N,) its example's original position. Copies have those of the copied examples.
        """
        self.describe_as(true)
        self.originals, self._true, self._own = originals, true, own

    @property
    def sizes(self) -> np.ndarray:
        """Training examples per client (K,)."""
        return self._true.sizes

    def train(self, client: int) -> np.ndarray:
        """Return a client's training examples, int64 indices."""
        return self._own[client] if client in self._own else self._true.train(client)

    def true_train(self, client: int) -> np.ndarray:
        """Return a client's training examples with their true labels, int64 indices."""
        return self._true.train(client)

    def test(self, client: int) -> np.ndarray:
        """Return a client's own test examples, which have their true labels."""
        return self._true.test(client)

    @property
    def validation_sizes(self) -> np.ndarray:
        """Examples in each client's own validation part (K,)."""
        return self._true.validation_sizes

    def validation(self, client: int) -> np.ndarray:
        """Return a client's own validation examples, which have their true labels."""
        return self._true.validation(client)

    def class_counts(self) -> np.ndarray:
        """Return training examples per client and true class (K, C)."""
        return self._true.class_counts()

    def class_proportions(self) -> np.ndarray:
        """Return each client's true class proportions (K, C)."""
        return self._true.class_proportions()


def flip_labels(data: ImageData, partition: Partition, clients: Sequence[int]) -> tuple[ImageData, Flipped]:
    """Give attackers copies of their training examples with label C - 1 - c in place of c.

    Clients may share examples, so only the copies get wrong labels. Source: Fang et al. 2020, section 5.1.

    Args:
        data: The images.
        partition: Their partition.
        clients: The attackers.

    Returns:
        The images with the copies appended, and the partition over them.
    """
    parts = [partition.train(client) for client in clients]
    seen, ends = np.concatenate([np.zeros(0, dtype=np.int64), *parts]), len(data.y) + np.cumsum([len(part) for part in parts])
    copied, kept = torch.from_numpy(seen), torch.zeros(len(seen), dtype=torch.bool)
    more = replace(
        data,
        x=torch.cat([data.x, data.x[copied]]),
        y=torch.cat([data.y, data.num_classes - 1 - data.y[copied]]),
        test=torch.cat([data.test, kept]),
        validation=None if data.validation is None else torch.cat([data.validation, kept]),
        owner=None if data.owner is None else np.concatenate([data.owner, data.owner[seen]]),
    )
    own = {client: np.arange(end - len(part), end) for client, part, end in zip(clients, parts, ends.tolist(), strict=True)}
    return more, Flipped(partition, own, np.concatenate([np.arange(len(data.y)), seen]))
