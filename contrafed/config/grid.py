"""An experiment's grid: the jobs of a table or figure, in the experiment's own file.

    grid:
      strategy: [pmfl, fedau]  # a key or group, and its values
      seed: [0, 1]
      variant:  # a name of its own, and what each of its cases sets
        full: {}
        no_mct: {strategy.contrast_weight: 0, published.method: pmfl/no_mct}

The jobs are all combinations. On a command line every axis is set by its name, ``variant=no_mct`` and ``strategy=pmfl,moon``
alike. Beside it ``where`` says what holds for some choices only:

    where:
      dataset=svhn model=cnn_pmfl: {num_rounds: 1000, model.hidden: [128]}
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from contrafed.core import registry
from contrafed.core.errors import UserError, unknown

Case = dict[str, Any]  # dotted key or group -> value
Grid = dict[str, list[Any] | dict[str, Case]]

# What Hydra's grammar reads as one word.
WORD = re.compile(r"[A-Za-z_][\w./]*")


def read(experiment: str, section: Any) -> Grid:
    """Return the ``grid`` of an experiment's file as plain Python. Raises ``UserError`` for one that is none."""
    axes: Any = {} if section is None else OmegaConf.to_container(section)
    if not isinstance(axes, dict):
        raise UserError(f"experiment={experiment}: its grid must name axes, got {axes!r}")
    axes = {name: axis for name, axis in axes.items() if axis is not None}  # an axis that a file inherits and does without
    for name, axis in axes.items():
        for case in axis if isinstance(axis, dict) else ():
            if not isinstance(case, str):  # YAML's on, off, yes, no and numbers
                raise UserError(f"experiment={experiment}: grid.{name} has a case {case!r} that is no text: put it in quotes")
        listed = isinstance(axis, list) and axis
        named = isinstance(axis, dict) and axis and all(isinstance(case, dict) for case in axis.values())
        if not listed and not named:
            raise UserError(f"experiment={experiment}: grid.{name} must be a list of values or of named cases, got {axis!r}")
    return {str(name): axis for name, axis in axes.items()}


def cases(name: str, section: Any) -> dict[str, Case]:
    """Return what an experiment's section, such as ``where``, sets in each case; null is nothing. Raises ``UserError``."""
    found = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
    found = {} if found is None else found
    if not isinstance(found, dict) or not all(case is None or isinstance(case, dict) for case in found.values()):
        raise UserError(f"the experiment's {name} must be mappings by name, such as NAME: {{KEY: VALUE}}, got {found!r}")
    return {str(key): case or {} for key, case in found.items()}


def resolved(name: str, section: Any) -> Case:
    """Return a mapping of an experiment with its interpolations resolved. Raises ``UserError`` for anything else."""
    if not isinstance(section, DictConfig):
        raise UserError(f"the experiment's {name} must be a mapping, got {section!r}")
    found: Any = OmegaConf.to_container(section, resolve=True)
    return found


def text(value: Any) -> str:
    """Return a value as Hydra's grammar reads it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, str) and not WORD.fullmatch(value):
        return "'" + value.replace("'", "\\'") + "'"
    return value if isinstance(value, str) else json.dumps(value)


def axes_of(
    grid: Grid, asked: Mapping[str, list[str]], groups: Collection[str], default: Mapping[str, str]
) -> tuple[dict[str, list[str]], set[str]]:
    """Return each axis of a grid with the texts of its values, and which keys of the command line are used up by them.

    ``asked`` is key -> its values' texts on the command line. An axis's own name replaces its values, numbers as the grid
    writes them; a choice of ``groups`` that named cases make too, as ``dataset=svhn``, keeps the cases that make it, also by
    leaving the experiment's own, its ``default``. Raises ``UserError`` where no case is left.
    """
    axes, used = dict[str, list[str]](), set[str]()
    for name, axis in grid.items():
        if name in asked:
            axes[name] = [spelled(value, axis) for value in asked[name]]
            used.add(name)
            continue
        if isinstance(axis, list):
            axes[name] = [text(value) for value in axis]
            continue
        narrowing = {key for key in asked if key in groups and any(key in case for case in axis.values())}
        used |= narrowing
        axes[name] = [
            n for n, case in axis.items() if all(text(case.get(key, default.get(key))) in asked[key] for key in narrowing)
        ]
        if not axes[name]:
            wanted = " ".join(f"{key}={','.join(asked[key])}" for key in sorted(narrowing))
            raise UserError(f"no {name} of the grid has {wanted}; its cases: {', '.join(axis)}")
    return axes, used


def spelled(value: str, axis: list[Any] | dict[str, Case]) -> str:
    """Return a value's text as a list of values has it: 1 is the 1.0 of a table."""
    known = [text(one) for one in axis] if isinstance(axis, list) else []
    return next((own for own in known if _number(own) == _number(value)), value)


def _number(word: str) -> float | str:
    """Return what a text is as a number, by which 1 is the 1.0 of a table; itself where it is none."""
    try:
        return float(word)
    except ValueError:
        return word


def holds(condition: str, config: Any, own: Path | None = None) -> bool:
    """Whether a condition of ``where``, such as ``dataset=svhn model=cnn_pmfl``, holds for a composed configuration.

    ``own``: a folder of YAMLs of one's own. Raises ``UserError`` for one that is no ``group=choice``, or of no such choice.
    """
    for part in condition.split():
        group, sign, choice = part.partition("=")
        if not sign:
            raise UserError(f"where: '{condition}' must be conditions of the form group=choice")
        if group not in config:
            raise unknown(f"key in where '{condition}'", group, map(str, config))
        if (names := registry.choices(group, own)) and choice not in names:
            raise unknown(f"{group} in where '{condition}'", choice, names)
        here = config.get(group)
        if choice != str(here.get("name") if hasattr(here, "get") else here):
            return False
    return True
