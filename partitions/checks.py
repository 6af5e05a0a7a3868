"""What partitions are asked to do and what their code returns, checked: every fault is one line that names the partition."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from core import registry
from core.errors import UserError
from core.run import Choice


def split_of(choice: Choice, draw: Any) -> list[np.ndarray]:
    """Return K index arrays as the partition splits them. Raises ``UserError`` where what it returns is none."""
    said, module = said_of(choice, "split"), choice.module
    with registry.blamed(f"partition={choice.name}: {module.__name__}.split", str(module.__file__)):
        parts: list[np.ndarray] = module.split(choice.config, draw)
    if not isinstance(parts, list) or len(parts) != draw.num_nodes:
        got = f"{len(parts)} parts" if isinstance(parts, list) else type(parts).__name__
        raise UserError(f"{said} a list of {draw.num_nodes} index arrays, one a node; got {got}")
    for node, part in enumerate(parts):
        if not isinstance(part, np.ndarray) or part.ndim != 1 or (len(part) and not np.issubdtype(part.dtype, np.integer)):
            got = f"{part.dtype} {part.shape}" if isinstance(part, np.ndarray) else f"a {type(part).__name__}"
            raise UserError(f"{said} arrays (n,) of whole numbers; node {node} has {got}")
        if len(part) and (part.min() < 0 or part.max() >= len(draw.y)):
            raise UserError(f"{said} positions in draw.y, 0..{len(draw.y) - 1}; node {node} has {part.min()}..{part.max()}")
    parts = [part.astype(np.int64) for part in parts]
    check_distinct(parts, said)
    return parts


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


def check_lazy(choice: Choice, partition: Any, test: np.ndarray) -> None:
    """Raise ``UserError`` where the first or the last node holds images of the test split, ``test`` (n,) bool, to train on.

    Or what are no positions. Not every node is looked at: there may be a million of them, drawn when they are asked for.
    """
    said, module = said_of(choice, "lazy"), choice.module
    for node in sorted({0, partition.num_nodes - 1}):
        with registry.blamed(f"partition={choice.name}: {module.__name__}.lazy, node {node}", str(module.__file__)):
            train, own_test = np.asarray(partition.train(node)), np.asarray(partition.test(node))
        for part in (train, own_test):
            if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
                raise UserError(f"{said} parts (n,) of whole numbers; node {node} has {part.dtype} {part.shape}")
            if len(part) and not 0 <= part.min() <= part.max() < len(test):
                raise UserError(f"{said} positions in y, 0..{len(test) - 1}; node {node} has {part.min()}..{part.max()}")
        if test[train].any():
            raise UserError(
                f"{said} training parts within `pool`; node {node} has {test[train].sum()} images of the test split"
            )
        if len(both := np.intersect1d(train, own_test)):
            raise UserError(f"{said} test parts apart from training parts; node {node} has {len(both)} images in both")
