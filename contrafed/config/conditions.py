"""Apply settings that an experiment or a scale makes only for some choices, between the YAMLs and the command line."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from contrafed.config.checks import GROUPS, OPTIONAL_GROUPS
from contrafed.config.overrides import SERVER, hydra_key, parse_overrides
from contrafed.config.run_config import EVALUATION_KEYS, HOW_IT_RUNS, SCORING_KEYS, counts
from contrafed.config.sweep_grid import (
    Case,
    SweepGrid,
    condition_holds,
    format_value,
    match_value,
    read_conditions,
)
from contrafed.core import registry
from contrafed.core.errors import UserError, unknown
from contrafed.core.run_folder import read_config
from contrafed.core.schema import flatten_keys

# Keys that a command line may set in addition to an experiment and still have its setting.
FREE_KEYS = (*OPTIONAL_GROUPS, "seed", "settings", "log", "metrics", *HOW_IT_RUNS)

# What names a run's place in a paper's table.
PLACE_KEYS = {"published.dataset", "published.setting", "published.method"}


def find_experiment(overrides: Sequence[Override]) -> str | None:
    """Return the experiment that a command line chooses, None if it chooses none or several."""
    found = next((o for o in overrides if o.key_or_group == "experiment" and not o.is_sweep_override()), None)
    return None if found is None or found.is_delete() or found.value() is None else str(found.value())


def take_cases(task: list[Override], axes: SweepGrid, experiment: str | None) -> tuple[Case, list[Override]]:
    """Return the settings of the named cases on a command line, and the other overrides with the choices of the cases.

    A choice on the command line itself stays. Raises ``UserError`` for a case that does not exist.
    """
    cases = {name: axis for name, axis in axes.items() if isinstance(axis, dict)}
    rest = [_match_override(o, axes) for o in task if o.key_or_group not in cases]
    made = {o.key_or_group for o in rest}
    values: Case = {}
    for override in (o for o in task if o.key_or_group in cases):
        name, known = str(override.value()), cases[override.key_or_group]
        if name not in known:
            raise unknown(f"{override.key_or_group} of experiment={experiment}", name, known)
        for key, value in ((hydra_key(key), value) for key, value in known[name].items()):
            if key not in GROUPS:
                values[key] = value
            elif key not in made:
                rest += parse_overrides([f"{key}={format_value(value)}"])
    return values, rest


def _match_override(override: Override, axes: SweepGrid) -> Override:
    key, _, value = str(override.input_line).partition("=")
    found = match_value(value, axes.get(key, {}))
    return override if found == value else parse_overrides([f"{key}={found}"])[0]


def remove_sections(config: DictConfig) -> tuple[dict[str, Case], Mapping[str, Any]]:
    """Remove ``where`` and ``grid`` from a configuration and return them. Raises ``UserError`` if they are malformed."""
    with open_dict(config):
        return read_conditions(config.pop("where", None)), config.pop("grid", None) or {}


def merge(
    config: DictConfig, *, asked: list[Override], task: list[Override], cases: Case, axes: SweepGrid, own: Path | None
) -> None:
    """Apply conditional settings in this order: ``where`` of the experiment, the chosen cases, ``where`` of the scale.

    The scale skips keys that the choices do not have. Settings of the command line stay.

    Conditions with a scale hold by the values that the cases have set.

    Args:
        config: The configuration, changed in place.
        asked: The command line.
        task: The command line with the choices of the cases.
        cases: Settings of the chosen cases.
        axes: The grid.
        own: The user's folder of YAMLs.

    Raises:
        UserError: For a key that does not exist.
    """
    where, _ = remove_sections(config)
    _check_where(where, config, axes)
    open_keys = _find_open_keys(OmegaConf.to_container(config), task)
    origin = {o.key_or_group: o.value() for o in asked if o.key_or_group in OPTIONAL_GROUPS and not o.is_delete()}
    if origin:
        with open_dict(config):
            config.experiment, config.scale = origin.get("experiment"), origin.get("scale")
            known = _read_paper_axes(_find_own_paper(config))
            free = {hydra_key(key) for key, axis in axes.items() if isinstance(axis, dict) or known is None or key in known}
            lines = [o for o in asked if not o.is_hydra_override() and o.key_or_group not in free]
            config.changed = [str(o.input_line) for o in lines if counts(o.key_or_group, FREE_KEYS)]
    if config.get("settings") is not None and not any("settings=" in condition for condition in where):
        raise UserError("settings: only an experiment of a paper has several. Fix: leave it out, or choose such an experiment")
    scaled = {condition: values for condition, values in where.items() if "scale=" in condition}
    holding = {c: values for c, values in where.items() if condition_holds(c, config, own) and c not in scaled}
    other_server = any(o.key_or_group == SERVER for o in task)  # then the method has other keys than its experiment expects
    for condition, values in holding.items():
        what = None if other_server and "strategy=" in condition else f"key in the experiment's where '{condition}'"
        _set_free_keys(config, values, task, what, open_keys)
    if origin.get("experiment") not in (None, *registry.choices("experiment")):  # reports cannot read the user's file
        with open_dict(config):
            config.method_keys = sorted({key for c, values in holding.items() if "strategy=" in c for key in values})
    kept = {key: OmegaConf.select(config, key) for key in cases if _is_set(key, task)}
    _set_free_keys(config, cases, [], "key in the experiment's grid", open_keys)
    # a small run, or one with another setting of a case's key, is compared with the full one's published value
    if config.get("published") is not None:
        _resolve_published(config)
        _name_own_cases(config, asked, axes)
    for key, value in kept.items():
        OmegaConf.update(config, key, value)
    for values in [values for condition, values in scaled.items() if condition_holds(condition, config, own)]:
        _set_free_keys(config, values, task, None, open_keys)
    if config.get("evaluate_only") is not None:
        _take_scoring(config, [o for o in task if not o.is_hydra_override()])


def _check_where(where: Mapping[str, Case], config: DictConfig, axes: SweepGrid) -> None:
    """Raise ``UserError`` for a choice in ``where``, and for a condition with an axis whose cases are named."""
    for condition, values in where.items():
        for group in (part.partition("=")[0] for part in condition.split()):
            if group not in config and isinstance(axes.get(group), dict):
                raise UserError(
                    f"{group}: where '{condition}' cannot depend on an axis with named cases. "
                    f"Fix: put what it sets into the cases of grid.{group}"
                )
        if choice := next((key for key in values if hydra_key(key) in GROUPS), None):
            raise UserError(
                f"{choice}: where '{condition}' cannot make a choice, it sets values. Fix: make the choice in a case of grid"
            )


def _find_open_keys(values: Any, task: list[Override], above: str = "") -> set[str]:
    """Return the keys that declare no keys below them, such as ``model.args``. The command line may have added some."""
    found = set[str]()
    for name, value in values.items():
        key = f"{above}{name}"
        added = isinstance(value, dict) and all(_is_set(f"{key}.{leaf}", task) for leaf in flatten_keys(value))
        if above and (value is None or added):
            found.add(key)
        elif isinstance(value, dict):
            found |= _find_open_keys(value, task, f"{key}.")
    return found


def _set_free_keys(config: DictConfig, values: Case, task: list[Override], what: str | None, open_keys: set[str]) -> None:
    """Set dotted keys that the command line does not set. ``open_keys`` take any key.

    Raises ``UserError`` with ``what`` for a missing key. If ``what`` is None the key is skipped.
    """
    for key, value in values.items():
        above, _, last = key.rpartition(".")
        group = OmegaConf.select(config, above) if above else config
        is_open = any(key.startswith(f"{name}.") for name in open_keys)
        if not is_open and (not isinstance(group, DictConfig) or last not in group):
            if what is not None:
                raise unknown(what, key, map(str, group if isinstance(group, DictConfig) else config))
        elif not _is_set(key, task):
            OmegaConf.update(config, key, value, force_add=is_open)


def _is_set(key: str, task: list[Override]) -> bool:
    """Return whether the command line sets a key, or a group that contains it. A mapping sets only its own keys."""
    asked = {o.key_or_group: o.value() for o in task if o.key_or_group not in GROUPS and not o.is_delete()}
    return any(f"{key}.".startswith(f"{name}.") for name in flatten_keys(asked))


def _resolve_published(config: DictConfig) -> None:
    if not isinstance(config.published, DictConfig):
        raise UserError(f"the experiment's published must be a mapping, got {config.published!r}")
    published: Any = OmegaConf.to_container(config.published, resolve=True)
    _check_published(published)
    OmegaConf.update(config, "published", published)


def _check_published(published: Mapping[str, Any]) -> None:
    """Raise ``UserError`` unless a table's place has all keys by which reports find it, and a figure's its kind and metric."""
    places: list[tuple[str, Any, tuple[str, ...]]] = []
    if published.get("table") and (cells := published.get("cells")):
        if not isinstance(cells, list):
            raise UserError(f"the experiment's published.cells must be a list, got {cells!r}")
        places = [("published", published, ("paper", "dataset", "method"))]
        places += [("published.cells", cell, ("setting", "metric", "value")) for cell in cells]
    if published.get("figure") and (plot := published.get("plot")):
        places += [("published", published, ("paper",)), ("published.plot", plot, ("kind", "metric"))]
    for where, place, keys in places:
        if missing := [key for key in keys if not isinstance(place, Mapping) or key not in place]:
            raise UserError(f"the experiment's {where} has no {missing[0]}. Fix: {where} with {', '.join(keys)}")


def _find_own_paper(config: DictConfig) -> str | None:
    """Return the paper in whose tables an experiment of the user's is, None for Contrafed's experiments."""
    published, experiment = config.get("published"), config.get("experiment")
    if experiment is None or experiment in registry.choices("experiment") or not isinstance(published, DictConfig):
        return None
    return None if published.get("paper") is None else str(published.paper)


@lru_cache
def _read_paper_axes(paper: str | None) -> frozenset[str] | None:
    """Return the names of the axes in a paper's grids, and each axis with what one of its cases sets. None without a paper of
    Contrafed's.
    """
    if paper is None or not (folder := registry.CONF / "experiment" / paper).is_dir():
        return None
    found = set[str]()
    for path in registry.yamls(folder):
        content: Any = OmegaConf.to_container(OmegaConf.load(path))
        for name, axis in (content.get("grid") or {}).items():
            found |= {name, *(_format_case(name, case) for case in (axis.values() if isinstance(axis, dict) else ()))}
    return frozenset(found)


def _format_case(axis: str, case: Case) -> str:
    return json.dumps([axis, case], sort_keys=True, default=str)


def _name_own_cases(config: DictConfig, asked: list[Override], axes: SweepGrid) -> None:
    """Name a job's place in a paper's table by the user's own cases, because a cell of the paper's has the paper's settings.

    A case that chooses a method is a row, any other a column. A case that names its place itself keeps it.
    """
    if (known := _read_paper_axes(_find_own_paper(config))) is None:
        return
    for override in asked:
        axis, name = axes.get(override.key_or_group), str(override.value())
        if not isinstance(axis, dict) or _format_case(override.key_or_group, case := axis[name]) in known:
            continue
        with open_dict(published := config.published):
            if PLACE_KEYS & case.keys() or case.keys() == {"strategy"}:
                continue
            if "strategy" in case:
                published.method = f"{published.method}/{name}"
            else:
                for place in (published, *(published.get("cells") or ())):
                    place.setting = f"{place.get('setting') or ''} {name}".strip()


def _take_scoring(config: DictConfig, task: list[Override]) -> None:
    """Make an evaluation of saved models evaluate all that their run did, except keys that the command line sets."""
    keys = [o.key_or_group for o in task]
    if others := [key for key in keys if key.split(".")[0] not in EVALUATION_KEYS]:
        raise UserError(
            f"evaluate_only: it takes the run's own configuration, so {', '.join(others)} cannot be set. "
            f"Fix: only {', '.join(EVALUATION_KEYS[1:])}"
        )
    folder = Path(str(config.evaluate_only)).expanduser()
    stored = read_config(folder) if (folder / "config.yaml").is_file() else {}
    for key in set(SCORING_KEYS) - {key.split(".")[0] for key in keys}:
        if stored.get(key):  # not for a "no", with which nothing might be evaluated
            OmegaConf.update(config, key, stored[key])
