"""Mark the positions of a partition with their client, so that each client's images are shifted in its own way."""

import numpy as np
import torch

from contrafed.data.feature_shift import FeatureShift, Shifter, draw_shifts
from contrafed.data.partition import Partition


class ShiftedPartition(Partition):
    """A partition whose positions also say whose image it is: position + (client + 1) N. So clients may share an example."""

    def __init__(self, dealt: Partition, originals: np.ndarray, config: FeatureShift, seed: int) -> None:
        """Mark the positions of ``dealt``, and draw the shifts from the federation's ``seed``.

        Args:
            dealt: The partition.
            originals: For each position (N,) its example's original position. Copies of an example have equal noise.
            config: Kind and strength of the shifts.
            seed: The federation's seed.
        """
        self.config, self.shifts, self._seed = config, draw_shifts(config, dealt.num_clients, seed), seed
        self.describe_as(dealt)
        self._dealt, self._originals, self._num_examples = dealt, originals, len(originals)

    def _mark(self, part: np.ndarray, client: int) -> np.ndarray:
        return part + (client + 1) * self._num_examples

    def make_shifter(self, device: torch.device) -> Shifter:
        """Return what shifts the images of marked positions on a device."""
        return Shifter(self.config, self.shifts, torch.from_numpy(self._originals), self._seed, device)

    @property
    def sizes(self) -> np.ndarray:
        """Training examples per client (K,)."""
        return self._dealt.sizes

    @property
    def test_sizes(self) -> np.ndarray:
        """Examples in each client's own test part (K,)."""
        return self._dealt.test_sizes

    @property
    def validation_sizes(self) -> np.ndarray:
        """Examples in each client's own validation part (K,)."""
        return self._dealt.validation_sizes

    def train(self, client: int) -> np.ndarray:
        """Return a client's training examples, marked."""
        return self._mark(self._dealt.train(client), client)

    def true_train(self, client: int) -> np.ndarray:
        """Return a client's training examples with their true labels, marked."""
        return self._mark(self._dealt.true_train(client), client)

    def test(self, client: int) -> np.ndarray:
        """Return a client's own test examples, marked."""
        return self._mark(self._dealt.test(client), client)

    def validation(self, client: int) -> np.ndarray:
        """Return a client's own validation examples, marked."""
        return self._mark(self._dealt.validation(client), client)

    def class_counts(self) -> np.ndarray:
        """Return training examples per client and class (K, C)."""
        return self._dealt.class_counts()

    def class_proportions(self) -> np.ndarray:
        """Return each client's class proportions (K, C)."""
        return self._dealt.class_proportions()
