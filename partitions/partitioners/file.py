"""file: index lists from a file, so that published partitions can be used unchanged."""

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.partition import Common


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    path: str | None


def explicit(config: Config, test: np.ndarray, num_clients: int) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Return each client's indices into the whole data set, and its test part if the file has one.

    The file holds a JSON list of index lists, or a dictionary from client to index list in JSON or as Python text. It may also
    hold ``{"train": ..., "test": ...}`` with one of these two for each.

    Args:
        config: Settings of the partition.
        test: Mask (N,) of the central test split, to which no index may point.
        num_clients: Number of clients.

    Raises:
        UserError: If the file is not valid.
    """
    path = Path(str(config.path)).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"partition.path: cannot read {path} ({error})") from error
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        try:
            found = ast.literal_eval(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise UserError(f"partition.path: {path} holds neither JSON nor a Python dictionary") from error
    parts = found if isinstance(found, dict) and set(found) == {"train", "test"} else {"train": found}
    lists = {name: _lists(value, path, num_clients) for name, value in parts.items()}
    every = np.concatenate([part for client_parts in lists.values() for part in client_parts])
    if len(every) and (every.min() < 0 or every.max() >= len(test)):
        raise UserError(f"{path}: indices must be in 0..{len(test) - 1}, found {every.min()}..{every.max()}")
    if len(np.unique(every)) != len(every):
        raise UserError(f"{path}: {len(every) - len(np.unique(every))} indices occur more than once")
    central = int(test[every].sum())
    if central:
        raise UserError(
            f"{path}: {central} indices point into the central test split; set dataset.merge_splits=true to partition all"
        )
    return lists["train"], lists.get("test")


def _lists(found: Any, path: Path, num_clients: int) -> list[np.ndarray]:
    if isinstance(found, dict):
        try:
            clients = {int(key): part for key, part in found.items()}
        except (TypeError, ValueError) as error:
            raise UserError(f"{path}: the keys of the dictionary must be client numbers") from error
        if set(clients) != set(range(len(found))):
            raise UserError(f"{path}: the keys of the dictionary must be the client numbers 0 to {len(found) - 1}, each once")
        found = [clients[client] for client in range(len(found))]
    if not isinstance(found, list) or not all(isinstance(part, list | tuple) for part in found):
        raise UserError(f"{path} must hold a list of index lists, one per client")
    if len(found) != num_clients:
        raise UserError(f"{path} has {len(found)} clients, num_clients={num_clients}")
    # Compare the type, because true and false are instances of int.
    odd = next((index for part in found for index in part if type(index) is not int or abs(index) >= 2**63), None)
    if odd is not None:
        raise UserError(f"{path}: indices must be whole numbers, found {str(odd)[:40]!r}")
    return [np.array(part, dtype=np.int64) for part in found]
