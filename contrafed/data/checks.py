"""What partitions are asked to do and what their code returns, checked: every fault is one line that names the partition."""

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError


def split_of(choice: Choice, draw: Any) -> list[np.ndarray]:
    """Return K index arrays as the partition splits them. Raises ``UserError`` where what it returns is none.

    And where it draws from a generator that all code shares: another job, or a run that goes on, would have other nodes.
    """
    said, before = said_of(choice, "split"), _shared_generators()
    with own_code(choice, "split"):
        found = choice.module.split(choice.config, draw)
    if moved := [name for name, state in _shared_generators().items() if state != before[name]]:
        raise UserError(f"{said} the same parts whenever it is asked: it draws from {moved[0]}, not from draw.rng")
    parts = _parts(found, draw.num_nodes, len(draw.y), said, "draw.y")
    check_distinct(parts, said)
    return parts


def explicit_of(choice: Choice, test: np.ndarray, num_nodes: int) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return each node's training part and its test part, if any, as the partition has them. Raises ``UserError`` for others.

    ``test`` (N,) bool marks the central test split, which nobody trains on.
    """
    with own_code(choice, "explicit"):
        found = choice.module.explicit(choice.config, test, num_nodes)
    said = said_of(choice, "explicit")
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(f"{said} training parts and test parts, or None for these, as a pair; got {type(found).__name__}")
    train = _parts(found[0], num_nodes, len(test), said, "all images")
    own = None if found[1] is None else _parts(found[1], num_nodes, len(test), said, "all images")
    check_distinct(train if own is None else [np.concatenate(both) for both in zip(train, own, strict=True)], said)
    for node, part in enumerate(train):
        _check_trained(part, test, said, node)
    return train, own


def check_lazy(choice: Choice, partition: Any, test: np.ndarray) -> None:
    """Raise ``UserError`` where the first or the last node holds images of the test split, ``test`` (N,) bool, to train on.

    Or what are no positions. Not every node is looked at: there may be a million of them, drawn when they are asked for.
    """
    said = said_of(choice, "lazy")
    for node in sorted({0, partition.num_nodes - 1}):
        with own_code(choice, "lazy"):
            found = partition.train(node), partition.test(node)
        train, own = (_part(part, len(test), said, node, "y") for part in found)
        _check_trained(train, test, said, node)
        if len(both := np.intersect1d(train, own)):
            raise UserError(f"{said} test parts apart from training parts; node {node} has {len(both)} images in both")


def own_code(choice: Choice, function: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which what goes wrong is the fault of a partition's function."""
    return registry.blamed(f"partition={choice.name}: {choice.module.__name__}.{function}", str(choice.module.__file__))


def _shared_generators() -> dict[str, Any]:
    """Return where the generators are that belong to nobody, by their names."""
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002 -- to see whether others use it
    return {"numpy.random": (np.asarray(keys).tobytes(), place), "random": random.getstate()}


def _parts(found: Any, num_nodes: int, size: int, said: str, of: str) -> list[np.ndarray]:
    """Return K index arrays into the ``size`` elements ``of`` something. Raises ``UserError`` for what are none."""
    if not isinstance(found, list) or len(found) != num_nodes:
        got = f"{len(found)} parts" if isinstance(found, list) else type(found).__name__
        raise UserError(f"{said} a list of {num_nodes} index arrays, one a node; got {got}")
    return [_part(part, size, said, node, of) for node, part in enumerate(found)]


def _part(part: Any, size: int, said: str, node: int, of: str) -> np.ndarray:
    """Return a node's index array (n,), int64."""
    if not isinstance(part, np.ndarray) or part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
        got = f"{part.dtype} {part.shape}" if isinstance(part, np.ndarray) else f"a {type(part).__name__}"
        raise UserError(f"{said} arrays (n,) of whole numbers; node {node} has {got}")
    if len(part) and not 0 <= part.min() <= part.max() < size:
        raise UserError(f"{said} positions in {of}, 0..{size - 1}; node {node} has {part.min()}..{part.max()}")
    return part.astype(np.int64)


def _check_trained(part: np.ndarray, test: np.ndarray, said: str, node: int) -> None:
    """Raise ``UserError`` where a node trains on images of the central test split."""
    if count := int(test[part].sum()):
        raise UserError(f"{said} training parts without test images; node {node} has {count} of the test split")


def said_of(choice: Choice, function: str) -> str:
    """Return how an error about what a partition's function returns begins."""
    return f"partition={choice.name}: {choice.module.__name__}.{function} must return"


def check_distinct(parts: Sequence[np.ndarray], said: str) -> None:
    """Raise ``UserError`` for an example that is dealt out twice: it could be trained on and tested with."""
    every = np.sort(np.concatenate(parts).astype(np.int64))
    repeated = every[1:][every[1:] == every[:-1]]
    if not len(repeated):
        return
    for node, part in enumerate(parts):
        if (distinct := len(np.unique(part))) < len(part):
            raise UserError(f"{said} no position twice; node {node} has {len(part)}, of which {distinct} distinct")
    first, second = [node for node, part in enumerate(parts) if (part == repeated[0]).any()][:2]
    shared = len(np.intersect1d(parts[first], parts[second]))
    raise UserError(
        f"{said} no position twice; nodes {first} and {second} share {shared}; define lazy where nodes are to share"
    )


def check(choice: Choice, num_nodes: int) -> None:
    """Raise ``UserError`` for settings that do not go together, or a file that is not there; loads no data."""
    check_common(choice, num_nodes)
    if hasattr(choice.config, "path"):
        if choice.config.path is None:
            raise UserError(f"partition={choice.name} needs partition.path")
        if not Path(choice.config.path).expanduser().is_file():
            raise UserError(f"partition.path: there is no file {choice.config.path}")


def check_common(choice: Choice, num_nodes: int) -> None:
    """Raise ``UserError`` for what every partition has settings for and this one, or so many nodes, cannot do."""
    module, common = choice.module, choice.config
    if common.scarce_nodes > num_nodes:
        raise UserError(f"partition.scarce_nodes={common.scarce_nodes} is more than num_nodes={num_nodes}")
    if hasattr(module, "lazy") or hasattr(module, "OWN"):
        unused = {
            "test_fraction": 0 if hasattr(module, "OWN") else common.test_fraction or 0,
            "scarce_nodes": common.scarce_nodes,
            "deal_test": common.deal_test,
            "min_node_size": common.min_node_size if hasattr(module, "OWN") else 0,
        }
        unused["keep_fraction"] = 1 - common.keep_fraction
        if any(unused.values()):
            key = next(key for key, value in unused.items() if value)
            raise UserError(f"partition={choice.name} has no partition.{key}: its nodes hold what they have, no more")
    if common.deal_test and (hasattr(module, "explicit") or common.test_fraction is not None):
        other = "partition=file" if hasattr(module, "explicit") else "partition.test_fraction"
        raise UserError(f"partition.deal_test and {other} both say what a node's test part is: set one of them")
