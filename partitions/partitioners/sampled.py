"""sampled: each client draws its examples with replacement on first use, so that a million clients cost nothing."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np

from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.partition import Common, Partition

# Number of clients whose class distributions are drawn at once. One generator per client would be slow.
CHUNK_CLIENTS = 256
# Number of chunks whose class counts are kept: those of 32,768 clients, 2.6 MB with ten classes.
MAX_KEPT_CHUNKS = 128
# Number of drawn examples that are kept, 8 MB. A client that participates again is not drawn again.
MAX_KEPT_EXAMPLES = 2**20


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    examples_per_client: Annotated[int, Range(ge=1)]
    alpha: Annotated[float, Range(gt=0)] | None


class SampledPartition(Partition):
    """Draw each client's examples as a pure function of (seed, client).

    Draw q, then class counts ~ Multinomial(n, q), then examples of each class. A client has no test part, because draws with
    replacement would overlap with it.

    Source: this project's design, from no paper.
    """

    def __init__(self, config: Config, y: np.ndarray, pool: np.ndarray, num_classes: int, num_clients: int, seed: int) -> None:
        self.num_clients, self.num_classes = num_clients, num_classes
        self.config, self.seed = config, seed
        self._by_class = pool[np.argsort(y[pool], kind="stable")]
        self._available = np.bincount(y[pool], minlength=num_classes)
        self._starts = np.cumsum(self._available) - self._available
        self._balance = self._available / len(pool)
        self._kept: dict[int, np.ndarray] = {}  # chunk -> its class counts
        self._drawn: dict[int, np.ndarray] = {}  # client -> its examples

    @property
    def sizes(self) -> np.ndarray:
        """Equal numbers of training examples per client (K,), without using memory."""
        return np.broadcast_to(np.int64(self.config.examples_per_client), self.num_clients)

    @property
    def test_sizes(self) -> np.ndarray:
        """Numbers of examples in the clients' own test parts (K,), all zero."""
        return np.broadcast_to(np.int64(0), self.num_clients)

    def train(self, client: int) -> np.ndarray:
        """Return a client's examples, drawn with replacement, as int64 indices in order of class."""
        if client not in self._drawn:
            if (len(self._drawn) + 1) * self.config.examples_per_client > MAX_KEPT_EXAMPLES:
                self._drawn.clear()
            self._drawn[client] = self._draw(client)
        return self._drawn[client]

    def _draw(self, client: int) -> np.ndarray:
        chunk, row = divmod(client, CHUNK_CLIENTS)
        if chunk not in self._kept:
            if len(self._kept) == MAX_KEPT_CHUNKS:
                self._kept.clear()
            self._kept[chunk] = self._chunk_counts(chunk)
        labels = np.repeat(np.arange(self.num_classes), self._kept[chunk][row])
        rng = generator(self.seed, "partition sampled", 0, client)
        return self._by_class[self._starts[labels] + rng.integers(0, self._available[labels])]

    def test(self, client: int) -> np.ndarray:
        """Return an empty array."""
        return np.zeros(0, dtype=np.int64)

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.concatenate([self._chunk_counts(chunk) for chunk in range(self._chunks)])[: self.num_clients]

    def class_proportions(self) -> np.ndarray:
        """Return the class distribution q from which each client draws (K, C), not the proportions of its draw."""
        if self.config.alpha is None:
            return np.broadcast_to(self._balance, (self.num_clients, self.num_classes))
        return np.concatenate([self._chunk_q(chunk) for chunk in range(self._chunks)])[: self.num_clients]

    @property
    def _chunks(self) -> int:
        return -(-self.num_clients // CHUNK_CLIENTS)

    def _chunk_q(self, chunk: int) -> np.ndarray:
        """Return q (CHUNK, C) ~ Dir(alpha 1_C) over the existing classes, or the balance of the data set."""
        if self.config.alpha is None:
            return np.broadcast_to(self._balance, (CHUNK_CLIENTS, self.num_classes))
        rng = generator(self.seed, "partition sampled classes", chunk)
        draw = rng.dirichlet(np.full(self.num_classes, self.config.alpha), CHUNK_CLIENTS) * (self._available > 0)
        totals = draw.sum(1, keepdims=True)
        return np.where(totals > 0, draw / np.where(totals > 0, totals, 1), self._balance)

    def _chunk_counts(self, chunk: int) -> np.ndarray:
        """Return examples per client and class (CHUNK, C), with rows that sum to n."""
        rng = generator(self.seed, "partition sampled counts", chunk)
        # The last class gets the rounding error, so existing classes come last.
        order = np.argsort(self._available > 0, kind="stable")
        counts = np.zeros((CHUNK_CLIENTS, self.num_classes), dtype=np.int64)
        counts[:, order] = rng.multinomial(self.config.examples_per_client, self._chunk_q(chunk)[:, order])
        return counts


def lazy(config: Config, y: np.ndarray, pool: np.ndarray, num_classes: int, num_clients: int, seed: int) -> SampledPartition:
    """Return the partition without drawing examples yet.

    Args:
        config: Settings of the partition.
        y: Labels (N,).
        pool: Indices (n,) of the training examples.
        num_classes: Number of classes.
        num_clients: Number of clients.
        seed: The run's seed.
    """
    return SampledPartition(config, y, pool, num_classes, num_clients, seed)
