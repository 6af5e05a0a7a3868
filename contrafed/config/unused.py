"""Find keys of a command line that have no effect, since another key turns them off (``OnlyWith``)."""

import typing
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

from contrafed.config.run_config import GROUPS, SERVER_GROUPS, Run
from contrafed.config.sweep_grid import format_value
from contrafed.core.schema import plain_numbers, rules_of


def warn_of_unused(jobs: Iterable[tuple[Iterable[str], Run]]) -> list[str]:
    """Return a line for each key without an effect, with the number of its jobs if there are several.

    Args:
        jobs: The command line of each job, and its run.
    """
    pairs = [(list(lines), run) for lines, run in jobs]
    found = Counter(line for lines, run in pairs for line in dict.fromkeys(find_unused(lines, run)))
    return [f"{line} ({number} of {len(pairs)} jobs)" if len(pairs) > 1 else line for line, number in found.items()]


def find_unused(lines: Iterable[str], run: Run) -> list[str]:
    """Return "KEY: no effect with OTHER=VALUE" for each such key of a command line. It describes ``run``."""
    found = []
    for line in lines:
        key = line.lstrip("+").partition("=")[0]
        group, _, rest = key.partition(".")
        configs = _configs_of(group, run) if group in GROUPS else [run]
        reasons = [_explain(config, (rest if group in GROUPS else key).split(".")) for config in configs]
        declared = [reason for reason in reasons if reason is not None]
        if declared and all(declared):  # the client and the server may have a key both
            above = key.rpartition(".")[0]
            found.append(f"{key}: no effect with {above}{'.' if above else ''}{declared[0]}")
    return found


def _configs_of(group: str, run: Run) -> list[Any]:
    """Return the dataclasses that hold a group's keys."""
    if group == "strategy":
        return [run.client.strategy.config, run.server.config]
    return [getattr(run if group in SERVER_GROUPS else run.client, group).config]


def _explain(config: Any, parts: list[str]) -> str | None:
    """Return the setting that turns a key off, empty if none does, and None if there is no such key."""
    hints = _read_hints(config.__class__)
    if parts[0] not in hints:
        return None
    if parts[1:]:
        return _explain(getattr(config, parts[0]), parts[1:])
    rules = [rule for rule in rules_of(hints[parts[0]]) if not rule.holds(config)]
    off = plain_numbers({rule.key: getattr(config, rule.key) for rule in rules})
    return next((f"{key}={format_value(value)}" for key, value in off.items()), "")


@cache
def _read_hints(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's keys, empty for another class."""
    return typing.get_type_hints(kind, include_extras=True) if hasattr(kind, "__dataclass_fields__") else {}
