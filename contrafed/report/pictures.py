"""Draw papers' figures with a picture per run, from the runs' folders: t-SNE, partition, participation."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from contrafed.core.errors import UserError
from contrafed.report.figure_data import place_of, plot_of
from contrafed.report.plots import as_written, head
from contrafed.report.runs import FinishedRun, read_table
from contrafed.runs.output.figures import show_participation, show_partition
from contrafed.runs.output.series import shown_clients

if TYPE_CHECKING:  # torch is slow to import
    from contrafed.data.federation import Federation

# Largest number of panels in a row and in total, and of points in a panel.
ACROSS, PANELS, POINTS = 5, 12, 1000
# Factor of a single panel's size.
SINGLE_PANEL_SCALE = 1.6


class Kind(NamedTuple):
    """How a picture's data are read, and how it is drawn into an empty part of a figure."""

    read: Callable[[FinishedRun, Path], Any]  # from a run and its folder, raises ``UserError``
    show: Callable[[Any, Any], None]
    size: tuple[float, float]  # inches


def draw(kind: str, runs: Sequence[FinishedRun], title: str) -> Figure | None:
    """Return a figure with a picture of each run, None if there is none. ``kind`` is one of ``KINDS``.

    Panels that share their first word are a row. Runs from ``results`` have no folder and no picture. Other runs without
    readable files, and those above ``PANELS``, are named on stderr, a line each.
    """
    read, show, (width, height) = KINDS[kind]
    found: dict[str, Any] = {}
    for run in runs:
        if run.folder is None:
            continue
        panel = place_of(run, plot_of(run)).panel
        try:
            if len(found) == PANELS:
                raise UserError(f"{PANELS} panels are the most")
            found[panel if panel not in found else f"{panel} ({run.name})"] = read(run, run.folder)
        except UserError as error:
            print(f"left out of {title}: {run.name}: {error}", file=sys.stderr)
    if not found:
        return None
    rows = _rows(list(found))
    across = max(map(len, rows))
    scale = SINGLE_PANEL_SCALE if len(found) == 1 else 1
    figure = Figure(figsize=(scale * across * width, scale * len(rows) * height + 0.4), layout="constrained")
    head(figure, title)
    parts = figure.subfigures(len(rows), across, squeeze=False)
    for line, row in zip(parts, rows, strict=True):
        for part, panel in zip(line, row, strict=False):
            part.suptitle(as_written(panel), fontsize=10)
            show(part, found[panel])
    named = {name: dots for axes in figure.axes for dots, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if named:
        names = sorted(named, key=int)
        dots = [named[name] for name in names]
        figure.legend(dots, names, loc="outside right upper", frameon=False, fontsize=9, title="class", markerscale=2)
    return figure


def _rows(panels: Sequence[str]) -> list[list[str]]:
    """Return panels in rows: by their first word if any two share it, else one after the other."""
    first = {panel: panel.partition(", ")[0] for panel in panels}
    if len(panels) == len(set(first.values())):
        first = dict.fromkeys(panels, "")
    rows: dict[str, list[str]] = {}
    for panel in panels:
        rows.setdefault(first[panel], []).append(panel)
    return [row[i : i + ACROSS] for row in rows.values() for i in range(0, len(row), ACROSS)]


class Embedding(NamedTuple):
    """A run's test images in two dimensions."""

    points: np.ndarray  # (n, 2)
    labels: np.ndarray  # (n,)
    classes: int
    whose: str  # whose models computed the representations


def _embedding(run: FinishedRun, folder: Path) -> Embedding:
    from contrafed.report import embedding

    federation, personal = _federation(run), bool(run.config.get("save_personal"))
    z, labels, _ = embedding.of_run(folder, personal=personal, limit=POINTS, federation=federation)
    whose = "clients' own models" if personal else "global model"
    return Embedding(embedding.tsne(z), labels, federation.data.num_classes, whose)


def _show_embedding(part: Any, found: Embedding) -> None:
    from contrafed.report.embedding import scatter

    axes = part.subplots()
    scatter(axes, found.points, found.labels, found.classes)
    axes.set_title(f"{found.whose}, {len(found.points):,} test images", fontsize=8)


def _class_counts(run: FinishedRun, folder: Path) -> np.ndarray:
    """Return the training examples by client and class (K, C)."""
    return _federation(run).partition.class_counts()


def _federation(run: FinishedRun) -> "Federation":
    """Return a run's data and partition as in the run. Nothing is downloaded. Raises ``UserError``."""
    from contrafed.data.federation import load_federation
    from contrafed.report.embedding import on_cpu
    from contrafed.runs.setup import check_config

    dataset: Mapping[str, Any] = run.config["dataset"]
    here = {**dataset, "download": False} if "download" in dataset else dataset
    federation = load_federation(check_config(on_cpu({**run.config, "dataset": here})).client)
    had, has = run.summary.get("stand_in"), federation.data.stand_in
    if had != has:
        said = [f"{stand_in} images" if stand_in else "the data set itself" for stand_in in (had, has)]
        raise UserError(f"it ran on {said[0]}, and at hand is {said[1]}")
    return federation


def _participants(run: FinishedRun, folder: Path) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
    """Return the arguments of ``show_participation``."""
    table = read_table(folder / "participants.csv", {"round": "int64", "client": "int64"})
    shown, rounds = shown_clients(run.config["num_clients"]), int(run.summary["rounds"])
    if not len(table):
        raise UserError("no client participated in any round")
    by_round = np.split(table["client"].to_numpy(), np.searchsorted(table["round"], np.arange(2, rounds + 1)))
    return [(len(ids), np.flatnonzero(np.isin(shown, ids))) for ids in by_round], shown


KINDS = {
    "tsne": Kind(_embedding, _show_embedding, (2.7, 2.8)),
    "partition": Kind(_class_counts, show_partition, (4.4, 3.9)),
    "availability": Kind(_participants, lambda part, found: show_participation(part, *found), (4.4, 4.2)),
}
