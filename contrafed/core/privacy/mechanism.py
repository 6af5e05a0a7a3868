"""What noise is made of: scale to a norm, as the Gaussian mechanism does, and draw."""

import secrets
from functools import partial

import numpy as np
import torch

from contrafed.core.privacy import laplace
from contrafed.core.privacy.gaussian import Gaussian
from contrafed.core.randomness import torch_generator
from contrafed.core.tensors import Tensors

KEY_BITS = 128


def clipped(tensors: Tensors, limit: float) -> Tensors:
    """Return each node's tensors (B, ...), scaled so that their joint L2 norm is at most ``limit``."""
    square = sum(tensor.double().reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values())
    assert isinstance(square, torch.Tensor)
    factor = (limit / square.sqrt()).clamp_max(1)  # of a norm of 0: infinity, then 1
    return {n: t * factor.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) for n, t in tensors.items()}


def noise(like: Tensors, how: Gaussian | laplace.Config, seed: int, purpose: str, server_round: int, node: int = 0) -> Tensors:
    """Return noise in the shapes of ``like``, float64, drawn in the order of the names: standard normal, or Laplace of scale 1.

    From the stream of (seed, purpose, round, node), or one that nobody can draw again: Philox under a key of 128 random bits,
    which is hard to guess but no cryptographic generator. Of a seed torch's own takes 32 bits, which can be tried out.
    """
    if how.noise == "secret":
        secret = np.random.Generator(np.random.Philox(key=secrets.randbits(KEY_BITS)))
        draw = secret.standard_normal if isinstance(how, Gaussian) else partial(secret.laplace, 0.0, 1.0)
        return {name: torch.as_tensor(draw(size=tuple(like[name].shape))).to(like[name].device) for name in sorted(like)}
    generator = torch_generator(seed, purpose, server_round, node)
    drawn = _normal if isinstance(how, Gaussian) else _laplace
    return {name: drawn(like[name].shape, generator).to(like[name].device) for name in sorted(like)}


def _normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _laplace(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Return draws of density exp(-|x|) / 2: the difference of two exponential ones."""
    a, b = (torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) for _ in range(2))
    return a - b
