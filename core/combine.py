"""Weighted sums of whole models in double precision: what every server rule is made of."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.tensors import Tensors, flat, unflat

# Numbers of a tensor that a core adds at a time, so that the sum stays in its cache.
BLOCK = 2**17
# Tensors read at the same time: one after another leaves most of the memory's speed unused.
AT_ONCE = 8
LARGE = 2**22  # numbers in a model from which on threads and a compiled loop are worth their start


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def combine(models: Sequence[Tensors], factors: Sequence[float]) -> Tensors:
    """Return ``sum_k factors[k] * models[k]`` for every tensor of the first model, accumulated in float64 in this order.

    Tensors of one name have one shape and one device. Raises ``ValueError`` without models or with another number of factors.
    """
    if not models:
        raise ValueError("no models to combine")
    if len(factors) != len(models):
        raise ValueError(f"{len(factors)} factors for {len(models)} models")
    first = models[0]
    if any(tensor.device.type != "cpu" for tensor in first.values()):
        elements = flat(first).double().zero_()
        for model, factor in zip(models, factors, strict=True):  # two kernels a model, not one a tensor
            elements.add_(flat({name: model[name] for name in first}), alpha=factor)
        return unflat(elements, first)
    totals = {name: torch.empty(like.shape, dtype=torch.float64) for name, like in first.items()}
    if sum(total.numel() for total in totals.values()) < LARGE:
        for name, total in totals.items():
            _add(total, [model[name] for model in models], factors)
        return totals
    compiled = _compiled()
    blocks: list[tuple[Callable[..., None], list[Any]]] = []  # how to add, and a piece of the sum and of what is added
    for name, total in totals.items():
        vectors: list[Any] = [tensor.reshape(-1) for tensor in (total, *(model[name] for model in models))]
        add: Callable[..., None] = _add
        if compiled is not None and all(vector.dtype == torch.float32 for vector in vectors[1:]):
            vectors, add = [vector.numpy() for vector in vectors], partial(_add_several, compiled)
        blocks += [(add, [v[start : start + BLOCK] for v in vectors]) for start in range(0, total.numel(), BLOCK)]
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda block: block[0](block[1][0], block[1][1:], factors), blocks))
    return totals


def _add(total: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Write the weighted sum of ``parts`` to ``total``."""
    total.zero_()
    for part, factor in zip(parts, factors, strict=True):
        total.add_(part, alpha=factor)


def _add_several(add: Callable[..., None], total: np.ndarray, parts: list[np.ndarray], factors: Sequence[float]) -> None:
    """Do the same to the last bit, for float32 vectors, several at a time by ``add``, which is ``_accumulate`` compiled."""
    total[:] = 0
    for first in range(0, len(parts), AT_ONCE):
        some, weights = parts[first : first + AT_ONCE], np.zeros(AT_ONCE)
        weights[: len(some)] = factors[first : first + AT_ONCE]
        add(total, *some, *some[-1:] * (AT_ONCE - len(some)), weights)  # what is missing counts for nothing


@cache
def _compiled() -> Callable[..., None] | None:
    """Return ``_accumulate`` as machine code that holds no lock while it runs; None where Numba is not installed."""
    try:
        from numba import njit
    except ImportError:
        return None
    # "contract": a product and a sum round once, as in torch's own addition.
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract"}}
    try:
        return njit(cache=True, **options)(_accumulate)
    except RuntimeError:  # no folder to keep it in
        return njit(**options)(_accumulate)


def _accumulate(total: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, weights: Any) -> None:
    """Add ``weights[0] * a + ... + weights[7] * h`` to ``total``; all are vectors of its length but ``weights`` (8,)."""
    q, r, s, t, u, v, w, x = weights
    for i in range(total.size):
        total[i] = total[i] + q * a[i] + r * b[i] + s * c[i] + t * d[i] + u * e[i] + v * f[i] + w * g[i] + x * h[i]
