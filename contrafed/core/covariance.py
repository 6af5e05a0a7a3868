"""Measure how representations spread within and between classes (FedRCL, Figures 2 and 3)."""

import math
from dataclasses import dataclass

import numpy as np

# Singular values below this share of the largest one count as zero in ranks and pseudo-inverses.
RELATIVE_RANK_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Spread:
    """The measures that FedRCL reports for a labelled set of representations."""

    within: float  # tr(S_W)
    between: float  # tr(S_B)
    effective_rank: float  # of S_W + S_B
    vci: float


def spread(features: np.ndarray, labels: np.ndarray, *, normalize: bool = False) -> Spread:
    """Compute traces, effective rank and VCI of labelled features.

    Args:
        features: Representations (n, D).
        labels: Class of each row (n,).
        normalize: Scale each row to length 1 first.

    Returns:
        The measures. All are NaN if a feature is not finite.
    """
    f = np.asarray(features, dtype=np.float64)
    if not np.isfinite(f).all():
        return Spread(*[math.nan] * 4)
    if normalize:
        f = f / np.maximum(np.linalg.norm(f, axis=1, keepdims=True), 1e-12)
    within, between = covariances(f, labels)
    return Spread(float(within.trace()), float(between.trace()), effective_rank(within + between), vci(within, between))


def covariances(features: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the covariance within classes and between classes.

    S_W = (1/n) sum_c sum_i (f_i - m_c)(f_i - m_c)' and S_B = (1/n) sum_c n_c (m_c - m)(m_c - m)'. They sum to the covariance of
    all features. A matrix is set to 0 if its trace is only rounding error compared with the features' mean square.

    Args:
        features: Representations (n, D).
        labels: Class of each row (n,).

    Returns:
        S_W and S_B, both (D, D).

    Raises:
        ValueError: If there are no features.
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
    rounding = RELATIVE_RANK_TOLERANCE**2 * np.square(f).sum(1).mean()
    within, between = (s if s.trace() > rounding else np.zeros_like(s) for s in both)
    return within, between


def effective_rank(covariance: np.ndarray) -> float:
    """Compute exp(-sum_k p_k log p_k) with p_k = s_k / sum s over the singular values s (Roy and Vetterli 2007).

    The result is 0 for a matrix of zeros.
    """
    s = np.linalg.svd(covariance, compute_uv=False)
    if not s.sum():
        return 0.0
    p = s / s.sum()
    p = p[p > 0]
    return float(np.exp(-(p * np.log(p)).sum()))


def vci(within: np.ndarray, between: np.ndarray) -> float:
    """Compute the variability collapse index 1 - tr(pinv(S_W + S_B) S_B) / rank(S_B) (Xu and Liu 2023).

    At 0 the classes have collapsed to distinct points. The result is 1 if S_B is 0. Invertible linear maps of the features do
    not change it.
    """
    s = np.linalg.svd(between, compute_uv=False)
    if not s[0]:
        return 1.0
    rank = int((s > RELATIVE_RANK_TOLERANCE * s[0]).sum())
    return float(1 - np.trace(np.linalg.pinv(within + between, rcond=RELATIVE_RANK_TOLERANCE, hermitian=True) @ between) / rank)
