"""Find the keys that differ between finished runs, and group runs that differ only in their seeds."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from contrafed.config.compose import compose_job, to_plain
from contrafed.core import registry
from contrafed.core.schema import flatten_keys, plain_numbers
from contrafed.report.csv_cells import EMPTY_CELL
from contrafed.report.experiment_keys import spread_settings
from contrafed.report.runs import FinishedRun, flat
from contrafed.report.statistics import KEPT_ERROR

DATA = "data_fingerprint"
OF_FILES = ("dataset.", "partition.", "participation.", "clock.")  # the keys that name a run's files


def settings(runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
    """Return {dotted key: value} of each run's configuration and the fingerprint of its data, for ``find_varied_keys``.

    A run may be older than a key. If another run of the same choice has the key, the older run gets today's default.
    """
    tables = [flat(run.config) for run in runs]
    methods = [run.method for run in runs]
    having: dict[tuple[str, str, str], None] = {}
    for method, table in zip(methods, tables, strict=True):
        having |= dict.fromkeys((*_choice(method, table, key), key) for key in table)
    for group, choice, key in having:
        for method, table in zip(methods, tables, strict=True):
            if key not in table and _choice(method, table, key) == (group, choice) and key in (now := _today(group, choice)):
                table[key] = now[key]
    known: dict[tuple[str, str], set[str]] = {}
    places = [known.setdefault(_choice(method, table, DATA), set()) for method, table in zip(methods, tables, strict=True)]
    for run, there in zip(runs, places, strict=True):
        there.update([str(run.summary[DATA])] if run.summary.get(DATA) else [])
    for run, table, there in zip(runs, tables, places, strict=True):
        if run.summary.get(DATA):
            table[DATA] = str(run.summary[DATA])
        elif len(there) == 1:  # a run without a fingerprint has the data of the others
            table[DATA] = next(iter(there))
    return tables


def _choice(method: str, table: dict[str, Any], key: str) -> tuple[str, str]:
    """Return a key's group and a run's choice in it, both empty for a key that every choice has.

    Data are only compared between runs that name the same files.
    """
    if key == DATA:
        return DATA, json.dumps([(k, v) for k, v in sorted(table.items()) if k.startswith(OF_FILES)], default=str)
    group, dot, rest = key.partition(".")
    if not dot or rest == "name":
        return "", ""
    return group, method if group == "strategy" else str(table.get(f"{group}.name", ""))


@lru_cache
def _today(group: str, choice: str) -> dict[str, Any]:
    """Return the values of a choice without an experiment. Unknown choices and groups without choices have none."""
    name, plus, server = choice.partition("+")
    if name and name not in registry.choices(group):
        return {}
    config = compose_job([*([f"{group}={name}"] if name else []), *([f"{group}.server={server}"] if plus else [])])
    return plain_numbers(flatten_keys(to_plain(config)))


def find_varied_keys(runs: Sequence[FinishedRun], tables: Sequence[dict[str, Any]] | None = None) -> list[str]:
    """Return the dotted keys that differ between these runs, except method and seed, in the order of the configuration.

    A key of a choice is only compared between runs of the same choice. So ``participation.beta`` differs between two Markov
    chains, but not between one and a pattern without such a key. A run of the choice that lacks it counts as one with null,
    because a mapping such as ``partition.arguments`` has any keys.

    Args:
        runs: The runs.
        tables: Their ``settings``, if they are computed already.
    """
    tables = settings(runs) if tables is None else tables
    keys = dict.fromkeys(key for table in tables for key in table if key not in ("strategy.name", "strategy.server"))
    methods = [run.method for run in runs]
    found = []
    for key in keys:
        values: dict[tuple[str, str], set[str]] = {}
        for method, table in zip(methods, tables, strict=True):
            if key in table or key != DATA:
                of_choice = values.setdefault(_choice(method, table, key), set())
                of_choice.add(json.dumps(table.get(key), default=str, sort_keys=True))
        if any(len(several) > 1 for several in values.values()):
            found.append(key)
    return found


def usable(runs: Sequence[FinishedRun], *, unfinished: bool = False) -> tuple[list[FinishedRun], list[str]]:
    """Return the runs for tables and figures, and a line about each excluded run.

    Excluded are runs without an evaluation, evaluations of another run's models, and runs that did not end (unless
    ``unfinished``). Of runs with the same configuration and seed only one is used: the one with most rounds, then with most
    metrics, then the last.
    """
    best: dict[str, FinishedRun] = {}
    same = [_identity(run, table) for run, table in zip(runs, settings(runs), strict=True)]
    for run, key in zip(runs, same, strict=True):
        if _has_accuracy(run):
            best[key] = max(run, best.get(key, run), key=_compute_progress)
    kept, aside = [], []
    for run, key in zip(runs, same, strict=True):
        if not _has_accuracy(run):
            aside.append(f"{run.name}: nothing was evaluated")
        elif run.config.get("evaluate_only"):
            aside.append(f"{run.name}: it scored what another run had saved")
        elif not run.is_finished and not unfinished:
            aside.append(f"{run.name}: {run.summary['status']} in round {run.summary['rounds']} of {run.config['num_rounds']}")
        elif best[key] is not run:
            aside.append(f"{run.name}: {best[key].name} is the same configuration and seed{_compare_last(run, best[key])}")
        else:
            kept.append(run)
    return kept, aside


def _identity(run: FinishedRun, table: dict[str, Any]) -> str:
    """Return a text that two runs share if they give the same number in the same table of a paper."""
    said = table | {key: run.config.get(key) for key in ("seed", "published")}
    return json.dumps([run.method, said], sort_keys=True, default=str)


def _has_accuracy(run: FinishedRun) -> bool:
    return any(metric == "accuracy" for _, _, metric in run.curves)


def _compare_last(run: FinishedRun, other: FinishedRun) -> str:
    """Return a remark if two runs of equal length have other last accuracies, which should be equal."""
    if run.summary["rounds"] != other.summary["rounds"]:
        return ""
    for key, points in run.curves.items():
        others = other.curves.get(key)
        if key[2] == "accuracy" and others and abs(points[-1][1] - others[-1][1]) > KEPT_ERROR:
            return f", with another result ({100 * points[-1][1]:.2f} and {100 * others[-1][1]:.2f})"
    return ""


def _compute_progress(run: FinishedRun) -> tuple[bool, int, int]:
    return run.is_finished, int(run.summary["rounds"]), len(run.config.get("metrics") or ())


# The runs of one row should agree in these entries of a summary. Names of versions begin with VERSIONS.
PROVENANCE_KEYS, VERSIONS = (
    (DATA, "weights_fingerprint.init_from", "weights_fingerprint.model.pretrained", "engine", "commit"),
    "versions.",
)
# Compared methods should agree in the first ones. The others are counts of a summary that should be 0.
BETWEEN, FAULTS = ("engine", "commit", "device"), {"failed clients": "failures", "rejected replies": "replies_rejected"}
# Largest number of rows that are named because their runs differ in these.
MAX_MIXES = 5


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seeds."""

    method: str
    setting: tuple[tuple[str, Any], ...]  # (varied key, value)
    runs: tuple[FinishedRun, ...]
    until: int | None = None  # the last round of runs that did not end

    @property
    def label(self) -> str:
        """The method and its varied keys: ``pmfl participation=markovian``, ``pmfl to round 800``."""
        varied = [f"{short(key)}={value}" for key, value in self.setting if value != EMPTY_CELL]
        return " ".join([self.method, *varied, *([] if self.until is None else [f"to round {self.until}"])])

    def numbers(self, key: str) -> list[float]:
        """Return one number of each seed's summary, NaN if it is missing."""
        return [run.number(key) for run in self.runs]


def group_runs(runs: Sequence[FinishedRun]) -> list[Group]:
    """Return the runs grouped over seeds, in the order of their first runs.

    Runs that did not end share a group if they ended in the same round. The same run for two tables of a paper counts once. A
    run that several ``settings`` share is in a group of each.
    """
    runs = spread_settings(runs)
    tables = settings(runs)
    keys = find_varied_keys(runs, tables)
    found: dict[tuple, dict[Any, FinishedRun]] = {}
    for run, table in zip(runs, tables, strict=True):
        setting = tuple((key, format_value(table.get(key))) for key in keys)
        until = None if run.is_finished else int(run.summary["rounds"])
        found.setdefault((run.method, setting, until), {})[run.config.get("seed")] = run
    return [Group(method, setting, tuple(of.values()), until) for (method, setting, until), of in found.items()]


def group_finished(runs: Sequence[FinishedRun]) -> list[Group]:
    """Return the groups of runs that have ended."""
    return [group for group in group_runs(runs) if group.until is None]


def _find_mixed(runs: Sequence[FinishedRun], keys: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (name, its values) of each of these entries of summaries, and of each version, that differs between runs."""
    known: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in flatten_keys(run.summary).items():
            if value not in (None, "") and (key in keys or key.startswith(VERSIONS)):
                known.setdefault(key.removeprefix(VERSIONS), {})[str(value)] = None
    return [(name, list(values)) for name, values in known.items() if len(values) > 1]


def describe_mixes(groups: Sequence[Group], name: Callable[[Group], str] = lambda group: group.label) -> str:
    """Return a line about groups whose runs differ in data, engine, commit or versions, empty if there are none.

    Args:
        groups: The rows of a table.
        name: How a row is named.
    """
    lines = []
    for group in groups:
        if mixed := [f"{key} ({', '.join(values)})" for key, values in _find_mixed(group.runs, PROVENANCE_KEYS)]:
            lines.append(f"{name(group)}: {', '.join(mixed)}")
    if not lines:
        return ""
    more = [f"and {len(lines) - MAX_MIXES} rows more"] if len(lines) > MAX_MIXES else []
    return f"Runs of one row differ in more than their seed: {'; '.join([*lines[:MAX_MIXES], *more])}."


def describe_differing(groups: Sequence[Group]) -> list[str]:
    """Return lines about other code or machines behind compared methods, and about runs with failures, if there are any."""
    faults = list[str]()
    for group in groups:
        counts = {name: sum(run.number(key) for run in group.runs if run.number(key) > 0) for name, key in FAULTS.items()}
        if said := [f"{count:.0f} {name}" for name, count in counts.items() if count]:
            faults.append(f"{group.label} ({', '.join(said)})")
    lines = []
    runs = [run for group in groups for run in group.runs]
    if mixed := [f"{key} ({_shorten(values)})" for key, values in _find_mixed(runs, BETWEEN)]:
        lines.append(f"The compared runs differ in more than method and setting: {', '.join(mixed)}.")
    if faults:
        lines.append(f"Runs with failures: {_shorten(faults, '; ')}.")
    return lines


def _shorten(names: Sequence[str], between: str = ", ") -> str:
    """Return names in a line, with the number of those after ``MAX_MIXES``."""
    more = [f"{len(names) - MAX_MIXES} more"] if len(names) > MAX_MIXES else []
    return between.join([*names[:MAX_MIXES], *more])


def short(key: str) -> str:
    """Return a dotted key as the head of a column: ``participation.name`` is ``participation``."""
    return key.removesuffix(".name").removeprefix("strategy.")


def number_of(text: str) -> float:
    """Return a cell as a number. A cell that is not a number gives infinity, which is sorted last."""
    try:
        return float(text)
    except ValueError:
        return math.inf


def format_value(value: Any) -> str:
    """Return a configuration's value as a cell."""
    if value is None:
        return EMPTY_CELL
    if isinstance(value, list | tuple | np.ndarray):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value)
