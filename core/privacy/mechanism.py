"""The Gaussian mechanism: scale to a norm, and add noise in proportion to it."""

import secrets

import torch

from core.privacy.gaussian import Gaussian
from core.randomness import torch_generator
from core.tensors import Tensors

SEED_BITS = 63


def clipped(tensors: Tensors, limit: float) -> Tensors:
    """Return each node's tensors (B, ...), scaled so that their joint L2 norm is at most ``limit``."""
    square = sum(tensor.double().reshape(len(tensor), -1).square().sum(1) for tensor in tensors.values())
    assert isinstance(square, torch.Tensor)
    factor = (limit / square.sqrt()).clamp_max(1)  # of a norm of 0: infinity, then 1
    return {n: t * factor.to(t.dtype).view(-1, *[1] * (t.dim() - 1)) for n, t in tensors.items()}


def noise(like: Tensors, how: Gaussian, seed: int, purpose: str, server_round: int, node: int = 0) -> Tensors:
    """Return standard normal noise in the shapes of ``like``, float64, drawn in the order of the names.

    From the stream of (seed, purpose, round, node), or one that nobody can draw again. torch's generator is a Mersenne twister,
    no cryptographic one.
    """
    generator = torch_generator(seed, purpose, server_round, node)
    if how.noise == "secret":
        generator = torch.Generator().manual_seed(secrets.randbits(SEED_BITS))
    drawn = {name: torch.randn(like[name].shape, generator=generator, dtype=torch.float64) for name in sorted(like)}
    return {name: value.to(like[name].device) for name, value in drawn.items()}
