"""Check partition settings, and what a partition's code returns. Every error is one line that names the partition."""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.disk import absent
from contrafed.core.errors import UserError


def split_of(choice: Choice, draw: Any) -> list[np.ndarray]:
    """Return K index arrays from the partition's ``split``.

    Raises:
        UserError: If it returns something else, or if it draws from a shared generator. Another job or a resumed run would then
            get other clients.
    """
    said, before, again = said_of(choice, "split"), _shared_generators(), replace(draw, rng=copy.deepcopy(draw.rng))
    with own_code(choice, "split"):
        found = choice.module.split(choice.config, draw)
    if before != _shared_generators():  # an import may have drawn, which happens once
        before = _shared_generators()
        with own_code(choice, "split"):
            choice.module.split(choice.config, replace(again, rng=copy.deepcopy(again.rng)))
    if moved := [name for name, state in _shared_generators().items() if state != before[name]]:
        raise UserError(f"{said} the same parts whenever it is asked: it draws from {moved[0]}, not from draw.rng")
    parts = _check_parts(found, draw.num_clients, len(draw.y), said, "draw.y")
    check_distinct(parts, said)
    if choice.is_own:
        with own_code(choice, "split"):
            repeated = choice.module.split(choice.config, again)
        _check_repeated(parts, _check_parts(repeated, draw.num_clients, len(draw.y), said, "draw.y"), said)
    return parts


def explicit_of(choice: Choice, test: np.ndarray, num_clients: int) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return each client's training part, and its test part if the partition has one.

    Args:
        choice: The partition.
        test: Marks the central test split (N,) bool. No client may train on it.
        num_clients: K.

    Returns:
        K training parts, and K test parts or None.

    Raises:
        UserError: If the partition's ``explicit`` returns something else.
    """
    said = said_of(choice, "explicit")
    train, own = _ask_explicit(choice, test, num_clients, said)
    check_distinct(train if own is None else [np.concatenate(both) for both in zip(train, own, strict=True)], said)
    for client, part in enumerate(train):
        _check_trained(part, test, said, client)
    if choice.is_own:
        again = _ask_explicit(choice, test, num_clients, said)
        _check_repeated([*train, *(own or [])], [*again[0], *(again[1] or [])], said)
    return train, own


def _ask_explicit(
    choice: Choice, test: np.ndarray, num_clients: int, said: str
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    with own_code(choice, "explicit"):
        found = choice.module.explicit(choice.config, test, num_clients)
    if not isinstance(found, tuple) or len(found) != 2:
        raise UserError(f"{said} training parts and test parts, or None for these, as a pair; got {type(found).__name__}")
    train = _check_parts(found[0], num_clients, len(test), said, "all images")
    return train, None if found[1] is None else _check_parts(found[1], num_clients, len(test), said, "all images")


def check_lazy(choice: Choice, partition: Any, test: np.ndarray, make: Callable[[], Any]) -> None:
    """Check the parts of the first and the last client.

    There may be a million clients, and their parts are drawn on request. So the others are not checked.

    Args:
        choice: The partition.
        partition: What its ``lazy`` returned.
        test: Marks the central test split (N,) bool.
        make: Calls ``lazy`` again.

    Raises:
        UserError: If they train on images of the test split, or if they are others when asked again. Also if their parts
            share examples or hold no positions.
    """
    said = said_of(choice, "lazy")
    with own_code(choice, "lazy"):
        again = make() if choice.is_own else partition
    for client in sorted({0, partition.num_clients - 1}):
        with own_code(choice, "lazy"):
            found = {"training": partition.train(client), "test": partition.test(client)}
            found["validation"] = partition.validation(client)
            repeated = [again.train(client), again.test(client), again.validation(client)]
        parts = {name: _check_part(part, len(test), said, client, "y") for name, part in found.items()}
        _check_repeated(list(parts.values()), repeated, said)
        for name in ("training", "validation"):
            _check_trained(parts[name], test, said, client, name)
        for one, other in itertools.combinations(parts, 2):
            if len(both := np.intersect1d(parts[one], parts[other])):
                apart = f"{other} parts apart from {one} parts; client {client} has {len(both)} images in both"
                raise UserError(f"{said} {apart}")


def _check_repeated(parts: Sequence[np.ndarray], again: Sequence[np.ndarray], said: str) -> None:
    """Raise ``UserError`` if parts differ when they are asked for again. A resumed run would then have other clients."""
    if len(parts) != len(again) or not all(map(np.array_equal, parts, again)):
        fix = "Fix: no generator without a given seed"
        raise UserError(f"{said} the same parts whenever it is asked, and returned other ones. {fix}")


def own_code(choice: Choice, function: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that reports errors in it as errors of a partition's function."""
    return registry.report_author_errors(
        f"partition={choice.name}: {choice.module.__name__}.{function}", str(choice.module.__file__)
    )


def _shared_generators() -> dict[str, Any]:
    """Return the states of the generators that all code shares, by name."""
    _, keys, place, *_ = np.random.get_state()  # noqa: NPY002 -- to see whether others use it
    found = {"numpy.random": (np.asarray(keys).tobytes(), place), "random": random.getstate()}
    return found | {"torch": torch.get_rng_state().numpy().tobytes()}


def _check_parts(found: Any, num_clients: int, size: int, said: str, of: str) -> list[np.ndarray]:
    """Return K index arrays into the ``size`` elements of ``of``. Raises ``UserError`` if ``found`` is something else."""
    if not isinstance(found, list) or len(found) != num_clients:
        got = f"{len(found)} parts" if isinstance(found, list) else type(found).__name__
        raise UserError(f"{said} a list of {num_clients} index arrays, one a client; got {got}")
    return [_check_part(part, size, said, client, of) for client, part in enumerate(found)]


def _check_part(part: Any, size: int, said: str, client: int, of: str) -> np.ndarray:
    """Return a client's index array (n,) as int64. Raises ``UserError`` if ``part`` is something else."""
    if not isinstance(part, np.ndarray) or part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
        got = f"{part.dtype} {part.shape}" if isinstance(part, np.ndarray) else f"a {type(part).__name__}"
        raise UserError(f"{said} arrays (n,) of whole numbers; client {client} has {got}")
    if len(part) and not 0 <= part.min() <= part.max() < size:
        raise UserError(f"{said} positions in {of}, 0..{size - 1}; client {client} has {part.min()}..{part.max()}")
    return part.astype(np.int64)


def _check_trained(part: np.ndarray, test: np.ndarray, said: str, client: int, name: str = "training") -> None:
    """Raise ``UserError`` if a client trains or validates on images of the central test split."""
    if count := int(test[part].sum()):
        raise UserError(f"{said} {name} parts without test images; client {client} has {count} of the test split")


def said_of(choice: Choice, function: str) -> str:
    """Return the start of an error about the result of a partition's function."""
    return f"partition={choice.name}: {choice.module.__name__}.{function} must return"


def check_distinct(parts: Sequence[np.ndarray], said: str) -> None:
    """Raise ``UserError`` if an example occurs twice, because it could be in training and in test parts."""
    every = np.sort(np.concatenate(parts).astype(np.int64))
    repeated = every[1:][every[1:] == every[:-1]]
    if not len(repeated):
        return
    for client, part in enumerate(parts):
        if (distinct := len(np.unique(part))) < len(part):
            raise UserError(f"{said} no position twice; client {client} has {len(part)}, of which {distinct} distinct")
    first, second = [client for client, part in enumerate(parts) if (part == repeated[0]).any()][:2]
    shared = len(np.intersect1d(parts[first], parts[second]))
    raise UserError(
        f"{said} no position twice; clients {first} and {second} share {shared}; define lazy where clients are to share"
    )


def check(choice: Choice, num_clients: int) -> None:
    """Raise ``UserError`` for settings that contradict each other, or for a missing file. Loads no data."""
    check_common(choice, num_clients)
    if hasattr(choice.config, "path"):
        if choice.config.path is None:
            raise UserError(f"partition={choice.name}: it needs a file. Fix: partition.path=FILE")
        if not Path(choice.config.path).expanduser().is_file():
            raise absent("partition.path", choice.config.path)


def check_validation(dataset: Choice, partition: Choice) -> None:
    """Raise ``UserError`` for a central validation split of images that the server does not deal."""
    if dataset.config.validation_fraction and hasattr(partition.module, "explicit"):
        raise UserError(
            f"dataset.validation_fraction: partition={partition.name} says itself which images clients train on. "
            "Fix: set partition.validation_fraction instead"
        )


def check_common(choice: Choice, num_clients: int) -> None:
    """Raise ``UserError`` for common settings that this partition, or this number of clients, does not support."""
    module, common = choice.module, choice.config
    if common.scarce_clients > num_clients:
        raise UserError(
            f"partition.scarce_clients={common.scarce_clients}: more than num_clients={num_clients}. Fix: a smaller number"
        )
    if hasattr(module, "lazy") or hasattr(module, "OWN"):
        unused = {
            "test_fraction": 0 if hasattr(module, "OWN") else common.test_fraction or 0,
            "validation_fraction": 0 if hasattr(module, "OWN") else common.validation_fraction,
            "scarce_clients": common.scarce_clients,
            "cut_test": common.cut_test,
            "deal_test": common.deal_test,
            "min_client_size": common.min_client_size if hasattr(module, "OWN") else 0,
            "feature_shift": hasattr(module, "OWN") and common.feature_shift.kind != "none",
        }
        unused["keep_fraction"] = 1 - common.keep_fraction
        if any(unused.values()):
            key = next(key for key, value in unused.items() if value)
            raise UserError(f"partition={choice.name}: it has no partition.{key}. Fix: leave it out")
    if common.deal_test and (hasattr(module, "explicit") or common.test_fraction is not None):
        other = "partition=file" if hasattr(module, "explicit") else "partition.test_fraction"
        raise UserError(f"partition.deal_test: {other} sets the clients' test parts too. Fix: set one of them")
