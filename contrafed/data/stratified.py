"""Take a share of a client's examples, of each class in proportion."""

import numpy as np


def keep_stratified(part: np.ndarray, y: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """Return max(1, round(fraction * n_c)) examples of each class c in ``part``, and at least 2 in total if there are 2."""
    chosen = []
    for label in np.unique(y[part]):
        members = rng.permutation(part[y[part] == label])
        chosen.append(members[: max(1, round(fraction * len(members)))])
    kept = np.concatenate(chosen) if chosen else part[:0]
    if len(kept) < 2 <= len(part):
        rest = np.setdiff1d(part, kept)
        kept = np.concatenate([kept, rng.permutation(rest)[: 2 - len(kept)]])
    return kept


def cut_stratified(part: np.ndarray, y: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cut round(fraction n) examples from a client's ``part`` (n,), each class in proportion (Webster's method).

    An example of each class is left, so fewer are cut from a client with few examples of each. Where classes have the same
    claim to one more example, the draw decides.

    Args:
        part: The client's examples (n,).
        y: Labels of all examples (N,).
        fraction: The share, 0 to 1.
        rng: The generator.

    Returns:
        What is left, in its order, and what was cut.
    """
    order = rng.permutation(part)
    _, place, counts = np.unique(y[order], return_inverse=True, return_counts=True)
    rank = np.empty(len(order), dtype=np.int64)  # of an example among those of its class
    rank[np.argsort(place, kind="stable")] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    claim = (rank + 0.5) / counts[place]
    first = np.argsort(claim, kind="stable")
    first = first[rank[first] < counts[place][first] - 1][: round(fraction * len(part))]
    held = order[np.sort(first)]
    return part[~np.isin(part, held)], held
