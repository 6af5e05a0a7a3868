"""How representations are spread within and between classes: FedRCL's Figures 2 and 3."""

import math
from dataclasses import dataclass

import numpy as np

# What is smaller than this share of the largest singular value counts as zero in ranks and pseudo-inverses.
RELATIVE = 1e-6


@dataclass(frozen=True)
class Spread:
    """What FedRCL reports of a labelled set of representations."""

    within: float  # tr(S_W)
    between: float  # tr(S_B)
    effective_rank: float  # of S_W + S_B
    vci: float


def spread(features: np.ndarray, labels: np.ndarray, *, normalize: bool = False) -> Spread:
    """Return the traces, the effective rank and the VCI of features (n, D) with labels (n,); ``normalize``: at length 1.

    All are NaN where a feature is not finite.
    """
    f = np.asarray(features, dtype=np.float64)
    if not np.isfinite(f).all():
        return Spread(*[math.nan] * 4)
    if normalize:
        f = f / np.maximum(np.linalg.norm(f, axis=1, keepdims=True), 1e-12)
    within, between = covariances(f, labels)
    return Spread(float(within.trace()), float(between.trace()), effective_rank(within + between), vci(within, between))


def covariances(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return S_W = (1/n) sum_c sum_i (f_i - m_c)(f_i - m_c)' and S_B = (1/n) sum_c n_c (m_c - m)(m_c - m)', both (D, D).

    They sum to the covariance of all features. One whose trace is rounding, next to the mean square of the features, is 0.
    Raises ``ValueError`` without any feature.
    """
    f = np.asarray(features, dtype=np.float64)
    if not len(f):
        raise ValueError("no features")
    _, number, counts = np.unique(labels, return_inverse=True, return_counts=True)
    means = np.zeros((len(counts), f.shape[1]))
    np.add.at(means, number, f)
    means /= counts[:, None]
    apart, centred = f - means[number], means - f.mean(0)
    both = apart.T @ apart / len(f), (centred * counts[:, None]).T @ centred / len(f)
    rounding = RELATIVE**2 * np.square(f).sum(1).mean()
    within, between = (s if s.trace() > rounding else np.zeros_like(s) for s in both)
    return within, between


def effective_rank(covariance: np.ndarray) -> float:
    """Return exp(-sum_k p_k log p_k), p_k = s_k / sum s of the singular values s (Roy and Vetterli 2007); 0 for zeros."""
    s = np.linalg.svd(covariance, compute_uv=False)
    if not s.sum():
        return 0.0
    p = s / s.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def vci(within: np.ndarray, between: np.ndarray) -> float:
    """Return 1 - tr(pinv(S_W + S_B) S_B) / rank(S_B), the variability collapse index (Xu and Liu 2023); 1 where S_B is 0.

    0: classes have collapsed to distinct points. Invariant under invertible linear maps of the features.
    """
    s = np.linalg.svd(between, compute_uv=False)
    if not s[0]:
        return 1.0
    rank = int((s > RELATIVE * s[0]).sum())
    return float(1 - np.trace(np.linalg.pinv(within + between, rcond=RELATIVE, hermitian=True) @ between) / rank)
