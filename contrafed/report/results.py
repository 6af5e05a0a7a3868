"""Keep runs in the repository: ``results/NAME.csv`` has a row per run, and further files their curves and clients.

Run folders are not committed. These files alone give the same tables and figures. A row has the run's numbers, versions,
hardware and commit, and its whole configuration as JSON. Only the last part of paths is kept. The file
``results/curves/NAME.csv`` has the evaluated points. Long curves are thinned evenly but keep each new maximum, so that the
round of a target stays the same. Bytes are summed up to each point. The file ``results/clients/NAME.csv`` has each client's
last values.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from contrafed.core.disk import replace as replace_file
from contrafed.core.errors import UserError
from contrafed.core.metrics import ACCURACY
from contrafed.core.run_folder import add_later_keys
from contrafed.report.csv_cells import escape_table, unescape_table
from contrafed.report.groups import settings
from contrafed.report.runs import (
    CLIENTS,
    MEAN_OF_CLIENTS,
    SIMULATED_TIME,
    FinishedRun,
    Points,
    add_earlier_settings,
    placeless,
    read_table,
)
from contrafed.runs.output.folder import number_names

# Approximate largest number of points of a curve.
MAX_POINTS = 1000
# First columns of a row, followed by the summary's and the configuration.
FIRST_COLUMNS = (
    *("run", "method", "dataset", "partition", "participation", "model"),
    *("seed", "num_clients", "num_rounds", "rounds", "status"),
)
# Values of log=[...] that are kept: metrics of clients.csv as their mean over clients, and these metrics of the split fit.
MEANS, FIT = ("weight", "own_weight", "weight_all"), ("deviation", "features_")
NAMES = ("scope", "split", "metric")
NUMBERS = ("seed", "num_clients", "num_rounds", "rounds")
WORDS = {*FIRST_COLUMNS[:6], "status", "commit", "hardware", "device", "engine", "data_fingerprint"}


def keep(runs: Sequence[FinishedRun], folder: Path, name: str) -> Path:
    """Add runs to ``folder/NAME.csv``, and return the file. A run with the same name and settings is replaced.

    A run of the same name with another seed, or another value of a shared key, gets the next free name: ``fedavg-2``. Each file
    is replaced as a whole, the rows last, so that every row has its curves.

    Raises:
        UserError: If the file cannot be written, or if its content cannot be read.
    """
    if Path(name).name != name or name == "..":
        raise UserError(f"results are kept by a name that is no path, such as {Path(name).name or 'runs'}, not '{name}'")
    path = folder / f"{name}.csv"
    known = {run.name: run for run in (load(path) if path.exists() else [])}
    for run in runs:
        free = next(name for name in number_names(run.name) if name not in known or _same(known[name], run))
        known[free] = replace(run, name=free)
    every = list(known.values())
    rows = [_row(run) for run in every]
    columns = [
        *FIRST_COLUMNS,
        *sorted({key for row in rows for key in row} - {*FIRST_COLUMNS, "configuration"}),
        "configuration",
    ]
    try:
        for part in ("curves", "clients"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for part, tables, nan in (("curves", map(_curves, every), ""), ("clients", map(_clients, every), "nan")):
            _write(pd.concat(tables, ignore_index=True), folder / part / path.name, "%.10g", nan)
        _write(pd.DataFrame(rows, columns=columns), path)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})") from error
    return path


def _same(one: FinishedRun, other: FinishedRun) -> bool:
    """Return whether two runs have one method, seed and configuration. A key that is newer than a run has its default."""
    tables = settings([replace(run, summary={}) for run in (one, other)])  # the data may have changed
    a, b = ({**placeless(table), "seed": run.config.get("seed")} for run, table in zip((one, other), tables, strict=True))
    return one.method == other.method and all(a.get(key) == b.get(key) for key in a.keys() | b.keys())


def _write(table: pd.DataFrame, path: Path, numbers: str | None = None, nan: str = "") -> None:
    """Write a CSV completely or not at all. ``numbers`` is the format of floats, ``nan`` the text of a missing value."""
    part = path.with_name(f".{path.name}.part")
    try:
        escape_table(table).to_csv(part, index=False, float_format=numbers, na_rep=nan, lineterminator="\n")
        replace_file(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path) -> list[FinishedRun]:
    """Return the runs of ``results/NAME.csv``. Raises ``UserError`` naming a file that cannot be read."""
    rows = _read(path)
    if not {"run", "configuration"} <= set(rows):
        raise UserError(f"cannot read {path}: it has no columns run and configuration")
    curves = _by_run(_long(_read(path.parent / "curves" / path.name), path))
    clients = _by_run(unescape_table(read_table(path.parent / "clients" / path.name, {"run": "str", **CLIENTS})))
    found = []
    for row in rows.to_dict("records"):
        try:
            config = add_earlier_settings(add_later_keys(json.loads(row.pop("configuration"))))
        except ValueError as error:
            raise UserError(f"cannot read {path}: the configuration of {row['run']} is no JSON") from error
        summary = {str(key): _value(str(key), str(cell)) for key, cell in row.items() if cell != ""}
        name = str(row["run"])
        metrics = curves(name)
        if wrong := [key for key, value in summary.items() if _is_number(key) and isinstance(value, str)]:
            raise UserError(f"cannot read {path}: {wrong[0]} of {name} is no number: {summary[wrong[0]]}")
        if summary.get("status") == "finished" and metrics["round"].max() != summary.get("rounds"):
            kept = path.parent / "curves" / path.name
            raise UserError(f"cannot read {kept}: {name} does not end with round {summary.get('rounds')}, as {path.name} says")
        found.append(FinishedRun(name, config, summary, metrics, partial(clients, name)))
    return found


def _by_run(table: pd.DataFrame) -> Callable[[str], pd.DataFrame]:
    """Return a function of a run's name that returns its rows."""
    plain = table.drop(columns="run")
    places = table.groupby("run").indices
    return lambda name: plain.iloc[places.get(name, [])]


def _read(path: Path) -> pd.DataFrame:
    try:
        return unescape_table(pd.read_csv(path, dtype=str, keep_default_na=False))
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise UserError(f"cannot read {path}: {what}") from error


def _is_number(key: str) -> bool:
    """Return whether an entry of a summary must be a number."""
    return key in NUMBERS or ACCURACY in key


def _value(key: str, cell: str) -> Any:
    if key in WORDS or key.startswith(("versions.", "weights_fingerprint.")):
        return cell
    try:
        return json.loads(cell.lower() if cell in ("True", "False") else cell)
    except ValueError:
        return cell


def _row(run: FinishedRun) -> dict[str, Any]:
    row: dict[str, Any] = {"run": run.name, "method": run.method}
    for key, value in placeless(run.summary).items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{inner}": text for inner, text in value.items()}
        elif value is not None and key not in row:
            row[key] = json.dumps(value) if isinstance(value, list) else value
    config = {key: value for key, value in run.config.items() if key not in ("output_dir", "verbose", "wait_for_clients")}
    return {**row, "configuration": json.dumps(placeless(config), separators=(",", ":"))}


def _curves(run: FinishedRun) -> pd.DataFrame:
    """Return a run's curves as columns ``scope/split/metric``, with a row per round that has any."""
    aside = ("system", "fit", "time")
    scored = {key: points for key, points in run.curves.items() if key[1] not in aside or key[2].startswith(FIT)}
    for metric in MEANS:
        if means := run.mean_over_clients(metric):
            scored[(*MEAN_OF_CLIENTS, metric)] = means
    kept = {key: _thin_points(points) for key, points in scored.items()}
    rounds = sorted({t for points in kept.values() for t, _ in points})
    for key, points in run.curves.items():
        if key[1] == "system" and rounds:
            kept[key] = _sum_by_round(points, rounds)
        if key == SIMULATED_TIME:
            kept[key] = [(t, value) for t, value in points if t in set(rounds)]
    kinds = {"system": "Int64"}  # counts, exactly
    table = pd.DataFrame(
        {"/".join(key): pd.Series(dict(points), dtype=kinds.get(key[1], "float64")) for key, points in kept.items()}
    )
    table = table.sort_index().rename_axis("round").reset_index()
    return _add_run_column(table, run.name)


def _add_run_column(table: pd.DataFrame, name: str) -> pd.DataFrame:
    table.insert(0, "run", name)
    return table


def _thin_points(points: Points) -> Points:
    """Return about ``MAX_POINTS`` of a curve's points: evenly chosen ones, the last, and each new maximum."""
    if len(points) <= MAX_POINTS:
        return points
    chosen = set(np.linspace(0, len(points) - 1, MAX_POINTS).astype(int).tolist())
    best = -math.inf
    for number, (t, value) in enumerate(points):
        if t >= 1 and value > best:
            best = value
            chosen.add(number)
    return [points[number] for number in sorted(chosen)]


def _sum_by_round(points: Points, rounds: Sequence[int]) -> Points:
    """Return the sums of a count since the previously kept round. Later rounds are added to the last one."""
    sums = dict.fromkeys(rounds, 0)
    for t, value in points:
        place = int(np.searchsorted(rounds, t))
        sums[rounds[min(place, len(rounds) - 1)]] += int(value)
    return list(sums.items())


def _long(curves: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return ``curves`` with the columns of ``metrics.csv``, after the run's name."""
    long = curves.melt(["run", "round"], var_name="key", value_name="value")
    long = long[long["value"] != ""]
    parts = {key: [*key.split("/", 2), None, None][:3] for key in curves.columns}
    try:
        names = {name: long["key"].map(lambda key, place=place: parts[key][place]) for place, name in enumerate(NAMES)}
        values = long[["round", "value"]].astype({"round": "int64", "value": "float64"})
    except ValueError as error:
        raise UserError(f"cannot read {path.parent / 'curves' / path.name}: {error}") from error
    return pd.DataFrame({"run": long["run"], "round": values["round"], **names, "value": values["value"]})


def _clients(run: FinishedRun) -> pd.DataFrame:
    """Return each client's last value of every metric, with its round."""
    table = run.clients
    last = table[table["round"] == table.groupby("metric")["round"].transform("max")]
    return _add_run_column(last.copy(), run.name)
