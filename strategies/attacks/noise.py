"""Attackers add Gaussian noise to their update."""

from dataclasses import dataclass
from typing import Annotated

import torch

from contrafed.core.randomness import torch_generator
from contrafed.core.schema import Range
from contrafed.core.tensors import Tensors
from contrafed.engines.attack import Attack, Attackers


@dataclass(frozen=True)
class Config(Attackers):
    """The attackers and the strength of the attack."""

    level: Annotated[float, Range(gt=0)]


class Noise(Attack):
    """Replace an update by Delta' = Delta + level rms(Delta) N(0, I).

    Each tensor has its own root mean square (rms), prototypes too. The same level thus has the same meaning for small and large
    models, and for early and late rounds.
    """

    def one(self, change: Tensors, server_round: int, client: int) -> Tensors:
        """Return the update with noise that seed, round and client determine."""
        draw, noisy = torch_generator(self.seed, "attack noise", server_round, client), Tensors()
        for name, tensor in sorted(change.items()):
            noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64).to(tensor)
            rms = float(tensor.double().square().nanmean().sqrt())
            noisy[name] = tensor + self.config.level * rms * noise
        return noisy
