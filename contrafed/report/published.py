"""Compare runs with the papers' tables.

``published/PAPER.csv`` holds every numeric results table as printed, with the columns paper, table, dataset, setting, method,
metric, value, std, note. Accuracies and ``std`` (FedCRL's and FedCoSR's) are percentages, ``rounds`` a count, ``speedup`` a
ratio to FedAvg, ``traffic_mb`` megabytes. A run's configuration names its row in ``published`` (``conf/experiment``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from contrafed.core.disk import shorten_name
from contrafed.core.errors import unknown
from contrafed.report.experiment_keys import spread_settings
from contrafed.report.groups import find_varied_keys, format_value, settings, short
from contrafed.report.runs import FinishedRun, placeless
from contrafed.report.statistics import first_at, over_seeds, ranks, spearman

FOLDER = Path(__file__).resolve().parent / "published"
LOWER_IS_BETTER = frozenset({"rounds", "traffic_mb"})
# Values of a target that no run reached, which get the last rank.
UNREACHED_VALUES = {"rounds": math.inf, "speedup": 0.0, "traffic_mb": math.inf}
# Metrics of the papers' tables that no run has, and the command that measures them.
MEASURED_BY = {"defended": "python -m contrafed.report.leakage"}
OTHER_SEEDS = (
    "Methods of one column have different seeds, so their ranks and correlation are less certain than paired differences"
)
# The keys of a table's column, and of one of its cells.
COLUMN = ["dataset", "setting", "metric"]
CELL = [*COLUMN, "method"]


@lru_cache
def load(paper: str) -> pd.DataFrame:
    """Return a paper's tables. Raises ``UserError`` for an unknown paper."""
    papers = [path.stem for path in FOLDER.glob("*.csv")]
    if paper not in papers:
        raise unknown("paper", paper, papers)
    table = pd.read_csv(FOLDER / f"{paper}.csv", dtype=str, keep_default_na=False)
    return table.assign(**{name: pd.to_numeric(table[name]) for name in ("value", "std")})


@dataclass(frozen=True)
class Comparison:
    """One table of a paper with our runs: a row per cell of the paper or of a run.

    The table ``cells`` has the columns dataset, setting, metric, method, paper, paper_std, note, ours, ours_std,
    ours_client_std, seeds, runs, seed_list, difference, rank, paper_rank. Here ours_std is over seeds, and ours_client_std the
    mean over seeds of the std over clients. The runs have the seeds of ``seed_list``. For rounds, speed-up and traffic to a
    target, ours is the mean over the ``seeds`` that reach it. It is ``UNREACHED_VALUES`` if no run does, which tables show as
    "-" and which shares the last rank. The function ``find_ranking_columns`` defines what is ranked together. Deviations of the
    runs are in ``changed`` and ``scale``. If several runs have the same cell and seed, the last one is used, and ``aside`` has
    a line about each other run.
    """

    paper: str
    table: str
    scale: str
    changed: tuple[str, ...]
    cells: pd.DataFrame
    aside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The paper's name and table: ``PMFL, Table I``."""
        return f"{load(self.paper)['paper'].iloc[0]}, Table {self.table}"

    @property
    def title(self) -> str:
        """``name``, and what our runs changed."""
        aside = [*([f"scale={self.scale}"] if self.scale else []), *self.changed]
        return self.name + (f" ({', '.join(aside)})" if aside else "")

    @property
    def stem(self) -> str:
        """The name of its files without ending."""
        parts = [self.paper, f"table{self.table}", *([self.scale] if self.scale else []), *self.changed]
        return shorten_name("-".join("".join(c if c.isalnum() or c in ".=" else "_" for c in part) for part in parts).lower())

    @property
    def both(self) -> pd.DataFrame:
        """The cells that have our value and the paper's."""
        return self.cells.dropna(subset=["ours", "paper"])

    @property
    def missing(self) -> pd.DataFrame:
        """The paper's cells without a run."""
        return self.cells[(self.cells["runs"] == 0) & self.cells["paper"].notna()]

    @property
    def silent(self) -> pd.DataFrame:
        """The paper's cells whose runs do not have the number: training images not evaluated, or no FedAvg to compare with."""
        return self.cells[(self.cells["runs"] > 0) & self.cells["ours"].isna() & self.cells["paper"].notna()]

    @property
    def elsewhere(self) -> list[str]:
        """Metrics of the table that no run has: keys of ``MEASURED_BY``."""
        theirs = load(self.paper)
        return [metric for metric in MEASURED_BY if metric in set(theirs[theirs["table"] == self.table]["metric"])]

    @property
    def has_other_seeds(self) -> bool:
        """Whether cells that are ranked together have other seeds."""
        return bool((self.both.groupby(find_ranking_columns(self.cells))["seed_list"].nunique() > 1).any())

    def columns(self) -> list[tuple[tuple[str, str, str], pd.DataFrame]]:
        """Return ((dataset, setting, metric), its cells) of the columns with a value of ours."""
        grouped = self.cells.groupby(COLUMN, sort=False)
        return [(key, part) for key, part in grouped if part["ours"].notna().any()]  # type: ignore[misc]

    def correlations(self) -> list[tuple[tuple[str, str, str], float, int]]:
        """Return (what is ranked, Spearman's correlation of its values, number of cells) for each with a value of ours.

        Cells of several columns are in no correlation: an easy and a hard column, or training and test images, agree for any
        methods.
        """
        grouped = self.cells.groupby(find_ranking_columns(self.cells), sort=False)
        some = [(key, part) for key, part in grouped if part["ours"].notna().any()]
        return [(key, *spearman(part["ours"].tolist(), part["paper"].tolist())) for key, part in some]  # type: ignore[misc]


def find_ranking_columns(cells: pd.DataFrame) -> list[str]:
    """Return the keys that cells of one ranking share: a column, whose methods are compared.

    If the paper's columns have one method each, the keys are data set, metric and method, whose settings are compared (PMFL,
    Table IV).
    """
    alone = cells.dropna(subset=["paper"]).groupby(COLUMN)["method"].nunique().eq(1).all()
    return ["dataset", "metric", "method"] if alone else COLUMN


def compare(runs: Sequence[FinishedRun]) -> list[Comparison]:
    """Return a comparison for every table of a paper that a run names, separately by ``scale`` and ``changed``.

    A run that did not end has no number to compare with a paper's. Metrics in ``MEASURED_BY`` are in no comparison. A run that
    several ``settings`` share is in a comparison of each.
    """
    found: dict[tuple[str, str, str, tuple[str, ...]], list[FinishedRun]] = {}
    for run in spread_settings(runs):
        published = run.published_values
        if run.is_finished and published.get("table") and published.get("cells"):
            key = (str(published["paper"]), str(published["table"]), str(run.config.get("scale") or ""), run.changed_settings)
            found.setdefault(key, []).append(run)
    return [_comparison(key, name_variants(members)) for key, members in found.items()]


def name_variants(runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    """Return the runs. Those that share a cell in spite of other configurations have separate columns, named by the keys.

    Which of them has the paper's settings is not known, so none of them is in the paper's cell.
    """
    cells: dict[tuple[str, ...], list[tuple[FinishedRun, str]]] = {}
    for run in runs:
        for cell, value in zip(_places(run), run.published_values["cells"], strict=True):
            cells.setdefault(cell, []).append((run, str(value["value"])))
    names: dict[int, str] = {}
    for filled in cells.values():
        members = [run for run, _ in filled]
        tables = [placeless(t) | {"published.value": value} for t, (_, value) in zip(settings(members), filled, strict=True)]
        keys = find_varied_keys(members, tables)
        for run, table in zip(members, tables, strict=True) if keys else ():
            names[id(run)] = " ".join(f"{short(key)}={format_value(table.get(key))}" for key in keys)
    return [_add_to_setting(run, names[id(run)]) if id(run) in names else run for run in runs]


def _places(run: FinishedRun) -> list[tuple[str, ...]]:
    """Return the cells that a run fills: their ``CELL``."""
    published = run.published_values
    cells = ((str(cell["setting"]), str(cell["metric"])) for cell in published["cells"])
    return [(str(published["dataset"]), *cell, str(published["method"])) for cell in cells]


def _add_to_setting(run: FinishedRun, name: str) -> FinishedRun:
    """Return a run in a column with a longer name than the paper's."""
    published = run.published_values
    cells = [{**cell, "setting": f"{cell['setting']} {name}".strip()} for cell in published["cells"]]
    longer = {**published, "setting": f"{published.get('setting') or ''} {name}".strip(), "cells": cells}
    return replace(run, config={**run.config, "published": longer})


def _comparison(key: tuple[str, str, str, tuple[str, ...]], runs: Sequence[FinishedRun]) -> Comparison:
    """Return one table with these runs, one run per cell and seed."""
    places = [(*_places(run), run.config.get("seed")) for run in runs]
    last = dict(zip(places, runs, strict=True))
    aside = [f"{run.name}: {last[place].name} is of the same cell and seed" for run, place in zip(runs, places, strict=True)
             if run is not last[place]]  # fmt: skip
    return Comparison(*key, _cells(key[0], key[1], list(last.values())), tuple(aside))


def _cells(paper: str, table: str, runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Return the cells of one table: the paper's, and those that only we have."""
    rows = [row for run in runs for row in _rows(run, runs)]
    ours = pd.DataFrame(rows, columns=[*CELL, "value", "client_std", "seed"])
    never = ours["metric"].map(UNREACHED_VALUES)
    ours["never"] = never.where(ours["value"] == never)
    ours["value"] = ours["value"].where(ours["never"].isna())
    means = ours.groupby(CELL, sort=False).agg(
        ours=("value", lambda values: over_seeds(list(values))[0]),
        ours_std=("value", lambda values: over_seeds(list(values))[1]),
        ours_client_std=("client_std", lambda values: over_seeds(list(values))[0]),
        seeds=("value", "count"),
        runs=("value", "size"),
        seed_list=("seed", lambda seeds: " ".join(map(str, sorted(seeds)))),
        never=("never", "max"),
    )
    means["ours"] = means["ours"].fillna(means.pop("never"))
    theirs = load(paper).drop(columns="paper").rename(columns={"value": "paper", "std": "paper_std"})
    theirs = theirs[(theirs["table"] == table) & ~theirs["metric"].isin(MEASURED_BY)].set_index(CELL)[
        ["paper", "paper_std", "note"]
    ]
    # The paper's order, followed by cells that the paper does not have.
    index = pd.MultiIndex.from_tuples(list(dict.fromkeys([*theirs.index, *means.index])), names=CELL)
    cells = theirs.reindex(index).join(means).fillna({"seeds": 0, "runs": 0, "seed_list": "", "note": ""})
    cells = cells.astype({"seeds": int, "runs": int}).reset_index()
    cells["difference"] = (cells["ours"] - cells["paper"]).where(cells["seeds"] > 0)
    for rank, column in (("rank", "ours"), ("paper_rank", "paper")):
        cells[rank] = math.nan
        for _, part in cells.dropna(subset=["ours", "paper"]).groupby(find_ranking_columns(cells)):
            if len(part) < 2:
                continue
            higher = part["metric"].iloc[0] not in LOWER_IS_BETTER
            cells.loc[part.index, rank] = ranks(part[column].tolist(), higher_is_better=higher)
    return cells


def _rows(run: FinishedRun, runs: Sequence[FinishedRun]) -> list[list[Any]]:
    """Return one run's values of the cells that it fills, in the papers' units."""
    rows: list[list[Any]] = []
    for place, cell in zip(_places(run), run.published_values["cells"], strict=True):
        key = str(cell["value"])
        value = TO_TARGET[key](run, _beside(run, runs)) if key in TO_TARGET else 100 * run.number(key)
        spread = 100 * run.number(str(cell["std"])) if cell.get("std") else math.nan
        rows.append([*place, value, spread, run.config["seed"]])
    return rows


def _beside(run: FinishedRun, runs: Sequence[FinishedRun]) -> FinishedRun | None:
    """Return FedAvg's run in the same column of the table, with the same seed, None if there is none."""

    def get_table_cell(other: FinishedRun) -> tuple[Any, ...]:
        published = other.published_values
        return published["dataset"], published["setting"], other.config.get("seed")

    return next(
        (o for o in runs if o.published_values["method"] == "fedavg" and get_table_cell(o) == get_table_cell(run)), None
    )


def rounds_to_target(run: FinishedRun, fedavg: FinishedRun | None) -> float:
    """Return the first round with an accuracy of at least FedAvg's last one, over the clients (MpFedcon Table 3).

    It is infinity if there is no such round, and NaN without FedAvg. For FedAvg itself it is the last round, according to the
    paper's speed-up of 1.
    """
    if fedavg is None or not fedavg.own_points():
        return math.nan
    if run is fedavg:
        return float(run.own_points()[-1][0])
    if not run.own_points():
        return math.nan
    reached = first_at(run.own_points(), fedavg.own_points()[-1][1])
    return math.inf if reached is None else float(reached)


def speedup_to_target(run: FinishedRun, fedavg: FinishedRun | None) -> float:
    """Compute FedAvg's rounds divided by ``rounds_to_target``: 200 by 116 is 1.72. It is 0 if the target is never reached."""
    return math.nan if fedavg is None else rounds_to_target(fedavg, fedavg) / rounds_to_target(run, fedavg)


def traffic_to_target(run: FinishedRun, fedavg: FinishedRun | None) -> float:
    """Compute ``rounds_to_target`` times a client's upload in a round (one way), in MiB, which the paper calls MB."""
    return rounds_to_target(run, fedavg) * run.number("bytes_up_per_client") / 2**20


TO_TARGET: dict[str, Callable[[FinishedRun, FinishedRun | None], float]] = {
    "rounds_to_target": rounds_to_target,
    "speedup_to_target": speedup_to_target,
    "traffic_to_target": traffic_to_target,
}
