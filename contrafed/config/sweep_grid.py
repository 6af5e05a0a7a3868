"""Read what an experiment's file contains in addition to settings: its grid, and settings for some choices only.

    grid:
      strategy: [pmfl, fedau]  # a key or group, and its values
      seed: [0, 1]
      variant:  # a new name, and what each of its cases sets
        full: {}
        no_mct: {strategy.contrast_weight: 0, published.method: pmfl/no_mct}
    where:
      dataset=svhn model=cnn_pmfl: {num_rounds: 1000, model.hidden: [128]}
      strategy=fedprox,scaffold: {strategy.local.momentum: 0.0}

The jobs of a sweep are all combinations of the grid. On a command line every axis is set by its name, as in ``variant=no_mct``
and ``strategy=pmfl,moon``.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from contrafed.core import registry
from contrafed.core.errors import UserError, unknown
from contrafed.core.schema import flatten_keys

Case = dict[str, Any]  # dotted key or group -> value
SweepGrid = dict[str, list[Any] | dict[str, Case]]

# What Hydra's grammar reads as one word.
WORD = re.compile(r"[A-Za-z_][\w./]*", re.ASCII)


def read_grid(experiment: str, section: Any) -> SweepGrid:
    """Return the ``grid`` of an experiment's file as plain Python. Raises ``UserError`` if it is not a grid."""
    axes: Any = {} if section is None else OmegaConf.to_container(section)
    if not isinstance(axes, dict):
        raise UserError(f"experiment={experiment}: its grid must name axes, got {axes!r}")
    # null: the file removes an axis that it inherits
    axes = {str(name): axis for name, axis in axes.items() if axis is not None}
    for name, axis in axes.items():
        for case in axis if isinstance(axis, dict) else ():
            if not isinstance(case, str):  # YAML's on, off, yes, no and numbers
                raise UserError(f"experiment={experiment}: grid.{name} has a case {case!r} that is no text: put it in quotes")
        listed = isinstance(axis, list) and axis
        cases = isinstance(axis, dict) and axis and all(isinstance(case, dict) for case in axis.values())
        if not listed and not cases:
            raise UserError(f"experiment={experiment}: grid.{name} must be a list of values or of named cases, got {axis!r}")
        if isinstance(axis, dict):
            axes[name] = {case: flatten_keys(values) for case, values in axis.items()}
    return axes


def read_conditions(section: Any) -> dict[str, Case]:
    """Return ``where`` of an experiment or a scale: condition -> the dotted keys it sets. Raises ``UserError`` for others."""
    found: Any = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(case is None or isinstance(case, dict) for case in found.values()):
        raise UserError(
            f"the experiment's where must be mappings by condition, such as GROUP=CHOICE: {{KEY: VALUE}}, got {found!r}"
        )
    return {str(key): flatten_keys(case or {}) for key, case in found.items()}


def condition_holds(condition: str, config: Any, own: Path | None = None) -> bool:
    """Return whether a condition such as ``dataset=svhn,mnist model=cnn_pmfl`` holds for a composed configuration.

    Args:
        condition: The condition.
        config: The configuration.
        own: The user's folder of YAMLs.

    Raises:
        UserError: For a group or choice that does not exist.
    """
    holds = True
    for part in condition.split():
        group, sign, wanted = part.partition("=")
        if not sign:
            raise UserError(f"where: '{condition}' must be conditions of the form group=choice")
        if group not in config:
            raise unknown(f"key in where '{condition}'", group, map(str, config))
        names, chosen = registry.choices(group, own), wanted.split(",")
        for name in chosen if names else ():
            if name not in names:
                raise unknown(f"{group} in where '{condition}'", name, names)
        here = OmegaConf.to_container(node) if OmegaConf.is_config(node := config.get(group)) else node
        here = here.get("name") if isinstance(here, dict) else here
        words = [word.lower() for word in chosen] if here is None or isinstance(here, bool) else chosen
        text = here if isinstance(here, str) else format_value(here)  # true and null, as on a command line
        holds = holds and _to_number(text) in map(_to_number, words)
    return holds


def format_value(value: Any) -> str:
    """Return a value as text in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(format_value, value)) + "]"
    if isinstance(value, str) and not WORD.fullmatch(value):
        # Backslashes stay as they are, but before a quote and at the end.
        return "'" + re.sub(r"(\\*)('|$)", lambda m: 2 * m[1] + ("\\'" if m[2] else ""), value) + "'"
    return value if isinstance(value, str) else json.dumps(value)


def select_axes(
    grid: SweepGrid, asked: Mapping[str, list[str]], groups: Collection[str], default: Mapping[str, str]
) -> tuple[dict[str, list[str]], set[str]]:
    """Return each axis of a grid with the texts of its values, and the keys of the command line that they use.

    The name of an axis on the command line replaces its values, with numbers as the grid writes them. A choice that named cases
    make, such as ``dataset=svhn``, selects the cases with this choice. A case without this key has the experiment's choice. An
    axis without such a case goes if its cases set nothing outside the group, as with ``partition=file`` of FedRCL's Table 1.

    Args:
        grid: The grid.
        asked: By key, the texts of its values on the command line.
        groups: Names of groups.
        default: The experiment's choices.

    Raises:
        UserError: If no case is left of an axis that sets other keys too.
    """
    axes, used = dict[str, list[str]](), set[str]()
    for name, axis in grid.items():
        if name in asked:
            axes[name] = [match_value(value, axis) for value in asked[name]]
            used.add(name)
            continue
        if isinstance(axis, list):
            axes[name] = [format_value(value) for value in axis]
            continue
        narrowing = {key for key in asked if key in groups and any(key in case for case in axis.values())}
        left = [n for n, case in axis.items() if all(format_value(case.get(k, default.get(k))) in asked[k] for k in narrowing)]
        if left:
            axes[name] = left
            used |= narrowing
        # Cases about this group alone, such as degrees of a skew, go: the command line has its own choice.
        elif not all({key.partition(".")[0] for key in case} <= narrowing for case in axis.values()):
            wanted = " ".join(f"{key}={','.join(asked[key])}" for key in sorted(narrowing))
            raise UserError(f"no {name} of the grid has {wanted}; its cases: {', '.join(axis)}")
    return axes, used


def match_value(value: str, axis: list[Any] | dict[str, Case]) -> str:
    """Return a value's text as it is in a list of values. So 1 matches the 1.0 of a table, by which published cells are
    found.
    """
    known = [format_value(one) for one in axis] if isinstance(axis, list) else []
    return next((own for own in known if _to_number(own) == _to_number(value)), value)


def _to_number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
