"""Find training settings that differ between the compared methods of a sweep."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from contrafed.core.display_names import name_key, name_method
from contrafed.core.schema import flatten_keys, plain_numbers

TRAINING = "strategy.local."
# Parts of a method's loss or algorithm, such as FedProx's pull.
OF_METHODS = (f"{TRAINING}proximal_weight", f"{TRAINING}keep_optimizer")
# The groups of a setting. Methods are compared within one.
SETTING = ("dataset", "partition", "participation", "model", "clock", "num_clients", "settings")
MAX_NAMED = 4  # keys that a sentence names, and methods of a key

# {key: {method: its values, as text}}
Differing = dict[str, dict[str, str]]


def find_differing_training(compared: Iterable[tuple[str, Mapping[str, Any]]]) -> Differing:
    """Return the keys ``strategy.local.*`` whose values are not the same for all methods that have them.

    They are compared over all runs, and within each setting: all groups but ``strategy``, such as the partition. A key that a
    sweep varies equally for every method does not differ.

    Args:
        compared: (method, its composed configuration) of each run.
    """
    everywhere: dict[str, dict[str, dict[str, None]]] = {}
    by_setting: dict[tuple[str, str], dict[str, set[str]]] = {}
    for method, config in compared:
        setting = json.dumps([config.get(group) for group in SETTING], sort_keys=True, default=str)
        for key, value in plain_numbers(flatten_keys(config["strategy"].get("local") or {}, TRAINING)).items():
            if key not in OF_METHODS:
                everywhere.setdefault(key, {}).setdefault(method, {})[_format(value)] = None
                by_setting.setdefault((key, setting), {}).setdefault(method, set()).add(_format(value))
    apart = {key for (key, _), methods in by_setting.items() if len(set(map(frozenset, methods.values()))) > 1}
    apart |= {key for key, methods in everywhere.items() if len(set(map(frozenset, methods.values()))) > 1}
    return {
        key: {method: "/".join(each) for method, each in methods.items()} for key, methods in everywhere.items() if key in apart
    }


def _format(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def warn_of_differing_training(found: Differing) -> str:
    """Return a line for the console, empty if nothing differs."""
    if not found:
        return ""
    return f"{_list_keys(found, str, str)}: not the same for all methods. Fix: set it for all, or choose an experiment"


def describe_differing_training(found: Differing) -> str:
    """Return a sentence for the footnote of a table, with display names. It is empty if nothing differs."""
    return f"Training settings differ between methods: {_list_keys(found, name_key, name_method)}." if found else ""


def _list_keys(found: Differing, show_key: Callable[[str], str], show_method: Callable[[str], str]) -> str:
    said = [f"{show_key(key)} ({_list_values(methods, show_method)})" for key, methods in list(found.items())[:MAX_NAMED]]
    return ", ".join([*said, *([f"and {len(found) - MAX_NAMED} more keys"] if len(found) > MAX_NAMED else [])])


def _list_values(methods: Mapping[str, str], show_method: Callable[[str], str]) -> str:
    """Return the methods that do not have the most frequent value, and that value: ``MOON 0.01, others 0.1``."""
    usual, _ = Counter(methods.values()).most_common(1)[0]
    apart = [f"{show_method(method)} {value}" for method, value in methods.items() if value != usual]
    more = [f"{len(apart) - MAX_NAMED} more methods differ"] if len(apart) > MAX_NAMED else []
    return ", ".join([*apart[:MAX_NAMED], *more, f"others {usual}"])
