"""Attackers add Gaussian noise to their change."""

from dataclasses import dataclass
from typing import Annotated

import torch

from contrafed.core.randomness import torch_generator
from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """Who attacks, and how much."""

    level: Annotated[float, Range(gt=0)]


class Noise(Attack):
    """Delta' = Delta + level rms(Delta) N(0, I), each tensor with its own root mean square, prototypes likewise.

    So the same level says as much of a small model as of a large one, and of late rounds as of early ones.
    """

    def one(self, change: Tensors, server_round: int, node: int) -> Tensors:
        """Return the change with noise, drawn by seed, round and node."""
        draw, noisy = torch_generator(self.seed, "attack noise", server_round, node), Tensors()
        for name, tensor in sorted(change.items()):
            noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor)
            rms = float(tensor.double().square().nanmean().sqrt())
            noisy[name] = tensor + self.config.level * rms * noise
        return noisy
