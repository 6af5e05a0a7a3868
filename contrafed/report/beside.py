"""Decide which runs of two methods are compared: what of a group of runs is its setting, and what is its method's own."""

from collections.abc import Sequence
from typing import Any

from contrafed.report.experiment_keys import find_method_keys
from contrafed.report.groups import Group

Pairs = list[tuple[str, Any]]  # (varied key, value)


class Beside:
    """The varied keys of groups, each in the setting by which groups of two methods are compared, or in the method.

    A method's own keys are those of ``strategy``, ``evaluate_after``, and what an experiment sets for single methods. A key
    belongs to the setting after all if the baseline has several values of it where the rest of the setting is the same. These
    are ``baseline_keys``.
    """

    def __init__(self, found: Sequence[Group], baseline: str | None) -> None:
        """Split the keys.

        Args:
            found: The groups.
            baseline: The method that others are compared with.
        """
        keys = [key for key, _ in found[0].setting] if found else []
        given = set[str]().union(*(find_method_keys(run) for group in found for run in group.runs))
        own = {key for key in keys if key.startswith("strategy.") or key == "evaluate_after" or key in given}
        self.baseline_keys = _find_varied(own, [group for group in found if group.method == baseline])
        self.own_keys = own - self.baseline_keys
        methods = {group.method for group in found}
        self._named = {m: _find_varied(self.own_keys, [group for group in found if group.method == m]) for m in methods}

    def setting(self, group: Group) -> Pairs:
        """Return the setting of a group, the same for the groups that it is compared with."""
        return [pair for pair in group.setting if pair[0] not in self.own_keys]

    def own(self, group: Group) -> Pairs:
        """Return the method's own keys that tell a group from others of its method in one setting."""
        return [pair for pair in group.setting if pair[0] in self._named.get(group.method, ())]


def _find_varied(keys: set[str], groups: Sequence[Group]) -> set[str]:
    """Return which of these keys have several values in groups that are equal in all other keys than these."""
    values: dict[tuple[Any, ...], dict[str, set[Any]]] = {}
    for group in groups:
        rest = tuple(pair for pair in group.setting if pair[0] not in keys)
        for key, value in group.setting:
            if key in keys:
                values.setdefault(rest, {}).setdefault(key, set()).add(value)
    return {key for several in values.values() for key, each in several.items() if len(each) > 1}
