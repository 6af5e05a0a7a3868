"""Read finished runs from their folders, and compare their configurations."""

import contextlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from contrafed.config.compose import composition
from contrafed.config.run_config import HOW_IT_RUNS, LABELS, counts
from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.core.metrics import ACCURACY
from contrafed.core.run_folder import MAX_LOG_BYTES, check_regular, read_config
from contrafed.core.schema import flatten_keys, plain_numbers
from contrafed.report.client_rows import select_rows
from contrafed.runs.output.series import points_of, summary_of_curves

Points = list[tuple[int, float]]

METRICS = {"round": "int64", "scope": "str", "split": "str", "metric": "str", "value": "float64"}
CLIENTS = {"round": "int64", "client": "int64", "metric": "str", "value": "float64"}

# Scope and split of the mean over clients of a metric of ``clients.csv``, as ``results`` keeps it.
MEAN_OF_CLIENTS = ("clients", "mean")

MAX_LINE_BYTES = 4096  # bytes, of a log

# Keys that do not distinguish experiments: where and how a run was executed, what it kept, and its labels.
IGNORED_KEYS = frozenset({*HOW_IT_RUNS, *LABELS, "seed", "log", "metrics"})

# The ``settings`` of a paper's experiment that a title does not name, and those of runs from before the key.
DEFAULT_SETTINGS, EARLIER_SETTINGS = "code", {"fedrcl": "code"}

# The curve of the simulated seconds up to the end of each round.
SIMULATED_TIME = ("global", "time", "simulated_time")


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """One run: its composed configuration, ``summary.json`` completed from its curves, and its logs as tables.

    Accuracies are fractions. ``metrics`` has the columns of ``metrics.csv``, ``clients`` those of ``clients.csv``.
    """

    name: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    metrics: pd.DataFrame
    read_clients: Callable[[], pd.DataFrame]
    folder: Path | None = None  # None: it is read from ``results``

    @cached_property
    def clients(self) -> pd.DataFrame:
        """The table ``clients.csv``, read on first access."""
        return self.read_clients()

    @cached_property
    def curves(self) -> dict[tuple[str, str, str], Points]:
        """The curves {(scope, split, metric): points (round, value)}."""
        return curves_of(self.metrics)

    @property
    def changed_settings(self) -> tuple[str, ...]:
        """What differs from the paper's experiment and its default settings, sorted: ``num_rounds=60``, ``settings=printed``.

        Overrides have only the last part of paths, and numbers in one spelling. Other ``settings`` than the default follow, and
        an experiment of the user's in a paper's table.
        """
        settings, experiment = self.config.get("settings"), self.config.get("experiment")
        said = [
            *(self.config.get("changed") or []),
            *([f"settings={settings}"] if settings not in (None, DEFAULT_SETTINGS) else []),
        ]
        if self.published_values.get("paper") and experiment and experiment not in registry.choices("experiment"):
            said.append(f"experiment={experiment}")
        return tuple(sorted(map(_one_spelling, placeless(said))))

    @property
    def published_values(self) -> Mapping[str, Any]:
        """The published value to compare with (``published`` in ``conf/experiment``), empty for other runs."""
        return self.config.get("published") or {}

    @property
    def method(self) -> str:
        """The method as the papers' tables name it: fedrcl, fedrcl+fedadam, pmfl/no_mct."""
        strategy = self.config["strategy"]
        named, server = str(self.published_values.get("method") or strategy["name"]), strategy.get("server")
        # A table that names methods by their client alone does not name the strategy.
        said = composition(strategy) == strategy["name"] or named == server or named.endswith(f"+{server}")
        return named if said else f"{named}+{server}"

    @property
    def is_finished(self) -> bool:
        """Whether it ended with its last round."""
        return self.summary.get("status") == "finished"

    @property
    def selects_on_validation(self) -> bool:
        """Whether its best evaluation is selected on validation data."""
        checked = any(split == "validation" for _, split, _ in self.curves)
        return self.summary.get("select_on", "validation" if checked else "test") == "validation"

    def points(self, scope: str, split: str, metric: str) -> Points:
        """Return a curve without the initial model's point, empty if there is none."""
        return points_of(self.curves, scope, split, metric)

    def over_time(self, points: Points) -> list[tuple[float, float]]:
        """Return a curve with simulated seconds in place of rounds, empty without a clock."""
        times = dict(self.points(*SIMULATED_TIME))
        return [(times[t], value) for t, value in points if t in times]

    def own_points(self, metric: str = "accuracy") -> Points:
        """Return a score of the clients on their own test parts, of personal models or else of the global model."""
        return self.points("personal", "test", metric) or self.points("global", "clients", metric)

    def of_clients(self, metric: str) -> pd.DataFrame:
        """Return the rows of ``clients.csv`` with a metric, without held-out clients, and scores without attackers."""
        return select_rows(self.clients, self.config, metric, self.summary.get("attackers"))

    def last_of_clients(self, metric: str) -> dict[int, float]:
        """Return {client: its value in the metric's last round} of training clients, empty if there is none."""
        table = self.of_clients(metric)
        table = table[table["round"] == table["round"].max()]
        return dict(zip(table["client"].tolist(), table["value"].tolist(), strict=True))

    def mean_over_clients(self, metric: str) -> Points:
        """Return (round, mean over training clients with the metric), from ``clients.csv`` or from ``results``."""
        if kept := self.points(*MEAN_OF_CLIENTS, metric):
            return kept
        means = self.of_clients(metric).groupby("round")["value"].mean()
        return list(zip(means.index.tolist(), means.tolist(), strict=True))

    def number(self, key: str) -> float:
        """Return a number of the summary, or a curve's last value (``SCOPE/SPLIT/METRIC``, ``own/METRIC``). NaN without one."""
        scope, slash, rest = key.partition("/")
        if slash:
            split, _, metric = rest.partition("/")
            points = self.own_points(rest) if scope == "own" else self.points(scope, split, metric)
            return points[-1][1] if points else math.nan
        value = self.summary.get(key)
        return float(value) if isinstance(value, int | float) else math.nan


def find(paths: Iterable[str | Path], damaged: list[str] | None = None) -> list[FinishedRun]:
    """Return the runs in and below folders.

    Args:
        paths: The folders.
        damaged: Receives a line about each run that cannot be read, if another run can. Otherwise that raises.

    Raises:
        UserError: For an unreadable run, or a folder without runs.
    """
    found: dict[Path, FinishedRun] = {}
    faults: list[UserError] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise UserError(f"there is no folder {path}. Fix: check the path")
        folders = sorted(_run_folders(path))
        for folder in folders:
            name = folder.resolve().name if folder == path else str(folder.relative_to(path))
            try:
                found.setdefault(folder.resolve(), read(folder, name))
            except UserError as error:
                faults.append(error)
        if not folders:
            raise UserError(f"there are no runs in {path}. Fix: a folder with config.yaml and metrics.csv in it or below")
    if faults and (damaged is None or not found):
        raise faults[0]
    if damaged is not None:
        damaged += map(str, faults)
    names = Counter(run.name for run in found.values())
    return [run if names[run.name] == 1 else replace(run, name=str(run.folder)) for run in found.values()]


def _run_folders(path: Path) -> Iterator[Path]:
    seen = set()
    for folder, below, files in os.walk(path, followlinks=True):
        if (place := os.path.realpath(folder)) in seen:  # a link to a folder above it
            below.clear()
            continue
        seen.add(place)
        if "config.yaml" in files and "metrics.csv" in files:
            below.clear()
            # An empty one is a claim: the run has not begun.
            claim = Path(folder) / "config.yaml"
            if claim.stat().st_size or not claim.is_file():
                yield Path(folder)


def read(folder: Path, name: str) -> FinishedRun:
    """Return the run in a folder. Raises ``UserError`` naming the file that cannot be read."""
    config = add_earlier_settings(read_config(folder))
    groups = [config.get(group) for group in ("strategy", "dataset", "partition", "participation", "model")]
    whole = all(isinstance(config.get(key), int) for key in ("num_clients", "num_rounds", "seed"))
    if not whole or not all(isinstance(group, dict) and isinstance(group.get("name"), str) for group in groups):
        raise UserError(f"{folder / 'config.yaml'} is no run's configuration")
    metrics = read_table(folder / "metrics.csv", METRICS)
    _check_metrics(folder / "metrics.csv", metrics)
    path, summary = folder / "clients.csv", _read_summary(folder)
    if summary["status"] == "finished":
        last, done = int(metrics["round"].max()) if len(metrics) else 0, summary.get("rounds", 0)
        if last < done:
            raise UserError(f"cannot read {folder / 'metrics.csv'}: it ends with round {last}, and the run with round {done}")
        if path.exists():
            _check_clients(path, metrics)
    return FinishedRun(
        name, config, complete(summary, config, metrics), metrics,
        lambda: read_table(path, CLIENTS) if path.exists() else pd.DataFrame(columns=list(CLIENTS)), folder,
    )  # fmt: skip


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / "summary.json"
    try:
        summary = json.loads(check_regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"status": "unfinished"}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path} ({type(error).__name__})") from error
    if not isinstance(summary, dict) or "status" not in summary or not isinstance(summary.get("rounds", 0), int):
        raise UserError(f"{path} is no run's summary")
    return summary


def read_table(path: Path, columns: Mapping[str, str]) -> pd.DataFrame:
    """Return a CSV with exactly these columns and types. Raises ``UserError`` naming the file and its fault."""
    try:
        kinds = {name: kind for name, kind in columns.items() if kind == "str"}
        table = pd.read_csv(_whole_lines(path), dtype=kinds, keep_default_na=False)
        _check_columns(path, table.columns, columns)
        return table[list(columns)].astype(dict(columns))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error


def _check_columns(path: Path, heads: Iterable[str], columns: Mapping[str, str]) -> None:
    if missing := [name for name in columns if name not in heads]:
        raise UserError(f"cannot read {path}: it has no column {missing[0]}")


def _check_metrics(path: Path, metrics: pd.DataFrame) -> None:
    """Raise ``UserError`` for a curve whose rounds do not increase, or an accuracy that is no fraction. It may be NaN."""
    for key, part in metrics.groupby(["scope", "split", "metric"], sort=False):
        if not part["round"].is_monotonic_increasing or not part["round"].is_unique:
            raise UserError(f"cannot read {path}: the rounds of {'/'.join(map(str, key))} do not increase")
    accuracies = metrics[metrics["metric"] == ACCURACY]["value"]
    if wrong := accuracies[(accuracies < 0) | (accuracies > 1)].tolist():
        raise UserError(f"cannot read {path}: an accuracy is {wrong[0]:g}, and must be from 0 to 1")


def _check_clients(path: Path, metrics: pd.DataFrame) -> None:
    """Raise ``UserError`` for a ``clients.csv`` without its columns, or that ends before the clients were last scored."""
    with check_regular(path, MAX_LOG_BYTES).open("rb") as file:
        heads = file.readline().decode(errors="replace").strip().split(",")
        _check_columns(path, heads, CLIENTS)
        start = file.tell()
        file.seek(max(start, path.stat().st_size - MAX_LINE_BYTES))
        lines = file.read().split(b"\n")[:-1]
    scored = metrics[(metrics["scope"] == "personal") | (metrics["split"] == "clients")]["round"]
    last = lines[-1].split(b",")[heads.index("round")] if lines else b""  # no row was kept
    if len(scored) and last.isdigit() and int(last) < scored.max():
        raise UserError(f"cannot read {path}: it ends with round {int(last)}, and clients were scored in round {scored.max()}")


def _whole_lines(path: Path) -> io.BytesIO:
    """Return a file without a last line that was cut off while it was written."""
    content = check_regular(path, MAX_LOG_BYTES).read_bytes()
    return io.BytesIO(content[: content.rfind(b"\n") + 1])


def curves_of(metrics: pd.DataFrame) -> dict[tuple[str, str, str], Points]:
    """Return {(scope, split, metric): points} of a table with the columns of ``metrics.csv``."""
    grouped = metrics.groupby(["scope", "split", "metric"], sort=False)
    return {key: list(zip(part["round"].tolist(), part["value"].tolist(), strict=True)) for key, part in grouped}


def complete(summary: Mapping[str, Any], config: Mapping[str, Any], metrics: pd.DataFrame) -> dict[str, Any]:
    """Return a summary with missing numbers filled in from the curves. For a run that did not end these are all numbers.

    The global model's accuracies on the clients' test parts are ``clients_accuracy_best`` and so on. Without personal models
    they are also ``personal_accuracy_best`` and so on, and ``own_model`` is False.
    """
    curves = curves_of(metrics)
    own = ("personal", "test", "accuracy") in curves
    clients = {("personal", "test", name): points for (_, split, name), points in curves.items() if split == "clients"}
    select_on = config.get("select_on")
    if not own and (checked := curves.get(("global", "validation", "accuracy"))):
        clients["personal", "validation", "accuracy"] = checked  # by which the best evaluation is chosen
    said, found = summary_of_curves(clients, select_on=select_on), summary_of_curves(curves, select_on=select_on)
    said = {key: value for key, value in said.items() if not key.startswith("personal_validation_")}
    found = found if own else {**said, **found}
    found |= {key.replace("personal_", "clients_", 1): value for key, value in said.items() if key.startswith("personal_")}
    derived: dict[str, Any] = {
        **{key: config.get(key) for key in ("seed", "num_clients", "num_rounds")},
        **{group: config[group]["name"] for group in ("dataset", "partition", "participation", "model")},
        "rounds": int(metrics["round"].max()) if len(metrics) else 0,
        "own_model": own,
        **{key: value for key, value in found.items() if not math.isnan(value)},
    }
    return derived | message_sizes(curves) | dict(summary)


def message_sizes(curves: Mapping[tuple[str, str, str], Points]) -> dict[str, float]:
    """Return ``bytes_down_per_client`` and ``bytes_up_per_client`` of a run whose summary has none, from its fullest round.

    All messages of a direction have one size, but failed, late, lost and rejected replies are not in the byte counts. So the
    largest number of bytes per selected client is used. It is too small only if something was missing in every round.
    """
    asked = {t: value for t, value in curves.get(("global", "system", "participants"), []) if value}
    found: dict[str, float] = {}
    for way in ("down", "up"):
        sizes = [value / asked[t] for t, value in curves.get(("global", "system", f"bytes_{way}"), []) if t in asked]
        found |= {f"bytes_{way}_per_client": max(sizes)} if sizes else {}
    return found


def add_earlier_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the ``settings`` of a paper's run from before the key: printed, FedRCL's code."""
    published = config.get("published")
    if "settings" in config or not isinstance(published, Mapping) or not published.get("paper"):
        return dict(config)
    return {**config, "settings": EARLIER_SETTINGS.get(str(published["paper"]), "printed")}


def placeless(value: Any) -> Any:
    """Return ``value`` with only the last part of every absolute path in it, also of those in an override KEY=PATH."""
    if isinstance(value, Mapping):
        return {key: placeless(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [placeless(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if value.startswith("~") or Path(value).is_absolute():
        return Path(value).name
    key, equals, text = value.partition("=")  # the first one, because a folder's name may also contain =
    return f"{key}={placeless(text)}" if equals else value


def _one_spelling(override: Any) -> str:
    key, equals, value = str(override).lstrip("+").partition("=")
    with contextlib.suppress(ValueError):
        value = f"{float(value):.12g}"
    return f"{key}{equals}{value}"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} of a configuration, without keys that do not distinguish experiments."""
    table = plain_numbers(flatten_keys(config))
    return {key: value for key, value in table.items() if counts(key, IGNORED_KEYS)}


def accuracy_of(runs: Sequence[FinishedRun], metric: str = "accuracy") -> tuple[str, Callable[[FinishedRun], Points]]:
    """Return a score that all of these runs have, in words and as a function that returns a run's curve.

    It is the global model's accuracy (or another ``metric``) on the test set if every run has it. Otherwise it is the clients'
    on their test parts. If some runs have only one and some only the other, each is shown by what it has, as the words say.
    """
    if all(run.points("global", "test", metric) for run in runs):
        return f"test {metric}", lambda run: run.points("global", "test", metric)
    if all(run.own_points(metric) for run in runs):
        return f"clients' {metric}", lambda run: run.own_points(metric)
    return f"{metric} (test set, else clients' own)", lambda run: run.points("global", "test", metric) or run.own_points(metric)


def ending_accuracy_of(runs: Sequence[FinishedRun]) -> tuple[str, Callable[[FinishedRun], Points]]:
    """Return, as ``accuracy_of`` does, the accuracy by which ``target_accuracy`` ends each run (``contrafed.runs.selection``).

    It is the personal models' if a run has them, and on the data that it selects on.
    """

    def find(run: FinishedRun) -> tuple[str, str]:
        split = "validation" if run.selects_on_validation else "test"
        return ("personal" if run.points("personal", split, "accuracy") else "global"), split

    words = {
        ("global", "test"): "test accuracy", ("personal", "test"): "clients' accuracy",
        ("global", "validation"): "validation accuracy", ("personal", "validation"): "clients' validation accuracy",
    }  # fmt: skip
    said = dict.fromkeys(words[find(run)] for run in runs)
    return " or ".join(said), lambda run: run.points(*find(run), "accuracy")


def beside_accuracy_of(runs: Sequence[FinishedRun]) -> list[str]:
    """Return the scores other than accuracy that the key ``metrics`` of any of these runs names."""
    return [
        name for name in dict.fromkeys(name for run in runs for name in run.config.get("metrics") or ()) if name != ACCURACY
    ]
