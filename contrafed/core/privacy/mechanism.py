"""Clip updates to a norm, and draw noise: the Gaussian mechanism and Laplace noise."""

import secrets
from functools import partial

import numpy as np
import torch

from contrafed.core.privacy import laplace
from contrafed.core.privacy.gaussian import Gaussian
from contrafed.core.randomness import torch_generator
from contrafed.core.tensors import Tensors

KEY_BITS = 128


def clip_norms(tensors: Tensors, limit: float) -> Tensors:
    """Scale each client's tensors so that their joint L2 norm is at most ``limit``.

    Args:
        tensors: By name, the values of B clients (B, ...).
        limit: The largest norm.

    Returns:
        Tensors of the same shapes.
    """
    square = sum(tensor.double().reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values())
    assert isinstance(square, torch.Tensor)
    factor = (limit / square.sqrt()).clamp_max(1)  # for a norm of 0: infinity, then 1
    return {n: t * factor.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) for n, t in tensors.items()}


def noise(
    like: Tensors, how: Gaussian | laplace.Config, seed: int, purpose: str, server_round: int, client: int = 0
) -> Tensors:
    """Draw noise in the shapes of ``like``: standard normal, or Laplace of scale 1.

    Noise comes from Philox under a random key of 128 bits of the operating system, and cannot be drawn again. With
    ``seeded_noise`` it comes from the stream of (seed, purpose, round, client). The key is hard to guess, but Philox is not a
    cryptographic generator. A generator of torch uses only 32 bits of a seed, and 32 bits can be searched.

    Args:
        like: Tensors whose names and shapes the noise gets.
        how: Settings of the noise.
        seed: The run's seed.
        purpose: Purpose string of the stream.
        server_round: The round.
        client: Partition id of the client.

    Returns:
        Noise in float64, drawn in the order of the names.
    """
    if not how.seeded_noise:
        secret = np.random.Generator(np.random.Philox(key=secrets.randbits(KEY_BITS)))
        draw = secret.standard_normal if isinstance(how, Gaussian) else partial(secret.laplace, 0.0, 1.0)
        return {name: torch.as_tensor(draw(size=tuple(like[name].shape))).to(like[name].device) for name in sorted(like)}
    generator = torch_generator(seed, purpose, server_round, client)
    drawn = _normal if isinstance(how, Gaussian) else _laplace
    return {name: drawn(like[name].shape, generator).to(like[name].device) for name in sorted(like)}


def _normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _laplace(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw with density exp(-|x|) / 2, as the difference of two exponential draws."""
    a, b = (torch.empty(shape, dtype=torch.float64).exponential_(generator=generator) for _ in range(2))
    return a - b
