"""Losses that methods share. Each is for one client, and a stack of clients calls them under ``vmap``.

A batch may be padded. Its ``mask`` (b,) is 1 for a real example and 0 for padding, and every mean is over the real ones.
"""

import torch
from torch import Tensor

from contrafed.core.tensors import Tensors

# A vector below this norm is treated as zero and has cosine 0 with every vector.
EPSILON = 1e-8


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean of ``values`` (b,) over the examples whose ``mask`` (b,) is 1. It is 0 without any."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the cross-entropy (b,) of ``logits`` (b, C) against labels ``y`` (b,)."""
    # Under vmap a gather needs fewer operations than F.cross_entropy, with the same numbers.
    return -torch.log_softmax(logits, dim=1).gather(1, y.unsqueeze(1)).squeeze(1)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean cross-entropy of ``logits`` (b, C) against labels ``y`` (b,)."""
    return masked_mean(cross_entropies(logits, y), mask)


def squared_distance(params: Tensors, others: Tensors) -> Tensor:
    """Compute ``|w - v|^2`` over the tensors v in ``others``, by name. Raises ``ValueError`` if there are none."""
    if not others:
        raise ValueError(
            "squared_distance has nothing to compare with: what train() takes as loss_inputs or reference_models is empty"
        )
    return torch.stack([(params[name] - other).square().sum() for name, other in others.items()]).sum()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Compute the cosine along the last axis. A zero vector has cosine 0 with every vector, and a finite gradient."""
    return (unit(a) * unit(b)).sum(-1)


def unit(a: Tensor) -> Tensor:
    """Compute ``a / max(|a|, 1e-8)`` along the last axis, with a finite gradient at 0."""
    # The norm's gradient at 0 is NaN. Clamping the square before the root keeps it 0.
    return a * a.square().sum(-1, keepdim=True).clamp_min(EPSILON**2).rsqrt()


def cosines(a: Tensor, directions: Tensor) -> Tensor:
    """Compute the cosines (b, J) of each example's ``a`` (b, D) with its J ``directions`` (b, J, D) of length 1 or 0."""
    shrink = a.square().sum(-1, keepdim=True).clamp_min(EPSILON**2).rsqrt()
    return (directions @ a.unsqueeze(-1)).squeeze(-1) * shrink


def without(scores: Tensor, gone: Tensor) -> Tensor:
    """Lower the ``scores`` (..., J) marked in ``gone``, so that a softmax gives them probability 0 and no gradient."""
    # A large finite number, because the gradient of -inf is NaN when it is multiplied by 0.
    return scores.masked_fill(gone, torch.finfo(scores.dtype).min / 4)


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute KL(softmax(teacher / T) || softmax(student / T)) per example (b,) of logits (b, C), without a factor T^2."""
    log_p, log_q = (torch.log_softmax(logits / temperature, dim=1) for logits in (teacher, student))
    return (log_p.exp() * (log_p - log_q)).sum(1)


def decorrelation(z: Tensor, mask: Tensor) -> Tensor:
    """Compute FedDecorr's penalty ``(1/n) mean over i != j of (X^T X)_ij^2``.

    X is the batch's z (b, D), standardised per dimension with the unbiased variance plus 1e-8. n is the number of real
    examples. For one example the penalty is exactly 0, with zero gradient.
    """
    count, width = mask.sum().clamp_min(1), z.shape[1]
    centred = (z - (z * mask.unsqueeze(1)).sum(0) / count) * mask.unsqueeze(1)
    variance = centred.square().sum(0) / (count - 1).clamp_min(1)
    standard = centred / (variance + EPSILON).sqrt()
    products = (standard.T @ standard).masked_fill(torch.eye(width, dtype=torch.bool, device=z.device), 0)
    return products.square().sum() / max(width * (width - 1), 1) / count


def contrast(scores: Tensor, negative: Tensor, missing: Tensor | None = None) -> Tensor:
    """Compute ``-log(sum_pos e^s / (sum_pos e^s + sum_neg e^s))`` per example.

    Args:
        scores: (b, J). The first is a positive.
        negative: Marks negatives (b, J).
        missing: Marks absent scores (J,). All scores that are neither negative nor missing are positives.

    Returns:
        The losses (b,). They are exactly 0, with zero gradient, without negatives.
    """
    if missing is not None:
        scores = without(scores, missing)
    # The first score less each logsumexp is the same difference, in one operation each.
    every, positive = torch.log_softmax(scores, dim=-1), torch.log_softmax(without(scores, negative), dim=-1)
    return (positive - every)[:, 0]


def prototype_contrast(z: Tensor, y: Tensor, means: Tensor, valid: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute ``-log(e^(cos(z, P_y)/T) / sum_c e^(cos(z, P_c)/T))`` over the classes c that have a prototype.

    Args:
        z: Representations (b, D).
        y: Labels (b,).
        means: Prototypes (C, D).
        valid: 1 for a class with a prototype (C,).
        temperature: T.

    Returns:
        The losses (b,), 0 if class y has no prototype.
    """
    scores, known = unit(z) @ unit(means).T / temperature, valid > 0
    every = torch.logsumexp(without(scores, ~known), dim=1)
    own = scores.gather(1, y.unsqueeze(1)).squeeze(1)
    return torch.where(known[y], every - own, torch.zeros_like(own))
