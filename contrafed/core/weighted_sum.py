"""Compute weighted sums of whole models in double precision, which all strategies use.

Five replies of ResNet-18 take 0.03 s in blocks over two cores (0.02 s in a compiled loop). A round of FedRCL's setting takes
minutes.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from contrafed.core.tensors import Tensors, flat, unflat

# Numbers of a tensor that a core adds at a time, so that the sum stays in its cache.
BLOCK_NUMBERS = 2**17
MIN_THREADED_NUMBERS = 2**22  # numbers in a model above which threads are worth starting


def cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def weighted_sum(models: Sequence[Tensors], factors: Sequence[float]) -> Tensors:
    """Compute ``sum_k factors[k] * models[k]`` for every tensor of the first model, in float64 and in this order.

    Args:
        models: Models with the same names. Tensors of one name have one shape and one device.
        factors: One factor per model.

    Raises:
        ValueError: Without models, or if the numbers of models and factors differ.
    """
    if not models:
        raise ValueError("no models to combine")
    if len(factors) != len(models):
        raise ValueError(f"{len(factors)} factors for {len(models)} models")
    first = models[0]
    if any(tensor.device.type != "cpu" for tensor in first.values()):
        elements = flat(first).double().zero_()
        for model, factor in zip(models, factors, strict=True):  # two kernels a model, not two a tensor
            elements.add_(flat({name: model[name] for name in first}), alpha=factor)
        return unflat(elements, first)
    totals = {name: torch.empty(like.shape, dtype=torch.float64) for name, like in first.items()}
    numbers = sum(total.numel() for total in totals.values())
    if totals and numbers <= BLOCK_NUMBERS:  # one call a model, not one a tensor
        torch._foreach_zero_(list(totals.values()))
        for model, factor in zip(models, factors, strict=True):
            torch._foreach_add_(list(totals.values()), [model[name] for name in totals], alpha=factor)
        return totals
    if numbers < MIN_THREADED_NUMBERS:
        for name, total in totals.items():
            _add(total, [model[name] for model in models], factors)
        return totals
    blocks: list[list[Tensor]] = []  # each block: a piece of the sum, and the pieces added to it
    for name, total in totals.items():
        vectors = [tensor.reshape(-1) for tensor in (total, *(model[name] for model in models))]
        blocks += [[v[start : start + BLOCK_NUMBERS] for v in vectors] for start in range(0, total.numel(), BLOCK_NUMBERS)]
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda block: _add(block[0], block[1:], factors), blocks))
    return totals


def _add(total: Tensor, parts: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Write the weighted sum of ``parts`` to ``total``."""
    total.zero_()
    for part, factor in zip(parts, factors, strict=True):
        total.add_(part, alpha=factor)


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Compute |a - b|^2 over all tensors of ``a``, in float64."""
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
