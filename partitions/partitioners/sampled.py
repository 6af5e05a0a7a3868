"""sampled: each node draws its examples with replacement when it is first asked, so that a million nodes cost nothing."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from contrafed.config import Range
from contrafed.randomness import generator
from partitions.partition import Partition

# Class distributions are drawn for so many nodes at a time: one generator a chunk, not one a node.
CHUNK = 4096


@dataclass(frozen=True)
class Config:
    """Settings of the partition."""

    examples_per_node: Annotated[int, Range(ge=1)]
    alpha: Annotated[float, Range(gt=0)] | None


class SampledPartition(Partition):
    """Nodes as pure functions of (seed, node). A node has no test part of its own: draws with replacement would overlap."""

    def __init__(self, config: Config, y: np.ndarray, pool: np.ndarray, num_classes: int, num_nodes: int, seed: int) -> None:
        self.num_nodes, self.num_classes = num_nodes, num_classes
        self.config, self.seed = config, seed
        self._members = [pool[y[pool] == c] for c in range(num_classes)]
        self._balance = np.array([len(m) for m in self._members]) / len(pool)

    @property
    def sizes(self) -> np.ndarray:
        """Training examples per node (K,), all the same; takes no memory."""
        return np.broadcast_to(np.int64(self.config.examples_per_node), self.num_nodes)

    def train(self, node: int) -> np.ndarray:
        """Draw a node's examples: classes from its distribution, then examples of the class, with replacement."""
        rng = generator(self.seed, "partition sampled", 0, node)
        labels = rng.choice(self.num_classes, self.config.examples_per_node, p=self._distribution(node))
        return np.array([self._members[c][rng.integers(len(self._members[c]))] for c in labels], dtype=np.int64)

    def test(self, node: int) -> np.ndarray:
        """Return an empty array."""
        return np.zeros(0, dtype=np.int64)

    def class_counts(self) -> np.ndarray:
        """Return expected examples per node and class (K, C), rounded: exact counts would draw every node."""
        return np.rint(self.class_proportions() * self.config.examples_per_node).astype(np.int64)

    def class_proportions(self) -> np.ndarray:
        """Return the class distribution that each node draws from (K, C)."""
        if self.config.alpha is None:
            return np.broadcast_to(self._balance, (self.num_nodes, self.num_classes))
        chunks = [self._chunk(c) for c in range(-(-self.num_nodes // CHUNK))]
        return np.concatenate(chunks)[: self.num_nodes]

    def _distribution(self, node: int) -> np.ndarray:
        return self._balance if self.config.alpha is None else self._chunk(node // CHUNK)[node % CHUNK]

    def _chunk(self, chunk: int) -> np.ndarray:
        """Return q ~ Dir(alpha 1_C) over the classes that exist, for 4,096 nodes."""
        rng = generator(self.seed, "partition sampled classes", chunk)
        assert self.config.alpha is not None
        draw = rng.dirichlet(np.full(self.num_classes, self.config.alpha), CHUNK) * (self._balance > 0)
        totals = draw.sum(1, keepdims=True)
        return np.where(totals > 0, draw / np.where(totals > 0, totals, 1), self._balance)


def lazy(config: Config, y: np.ndarray, pool: np.ndarray, num_classes: int, num_nodes: int, seed: int) -> SampledPartition:
    """Return the partition; nothing is drawn yet. ``pool`` (n,) are the training examples among labels ``y`` (N,)."""
    return SampledPartition(config, y, pool, num_classes, num_nodes, seed)
