"""The figures of a run, drawn without a display and without matplotlib's global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Okabe and Ito's colours, told apart by colour-blind readers as well.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"

Curves = Mapping[tuple[str, str, str], Sequence[tuple[int, float]]]


def accuracy_figure(path: Path, curves: Curves) -> None:
    """Draw accuracy against round: the global model on test and training data, the personal models with their spread."""
    figure, axes = _figure(7.2, 4.2)
    shown = 0
    kinds = (
        ("global", "test", BLUE, "global model, test"),
        ("global", "train", GREY, "global model, training data"),
        ("global", "nodes", GREEN, "global model, nodes' own test parts"),
        ("personal", "test", ORANGE, "personal models, own test parts"),
    )
    for scope, split, colour, label in kinds:
        points = curves.get((scope, split, "accuracy"), ())
        if not points:
            continue
        shown += 1
        rounds, values = zip(*points, strict=True)
        axes.plot(rounds, 100 * np.array(values), color=colour, label=label, linewidth=1.6)
        spread = curves.get((scope, split, "accuracy_std"), ())
        if len(spread) == len(points):
            middle, width = 100 * np.array(values), 100 * np.array([v for _, v in spread])
            axes.fill_between(rounds, middle - width, middle + width, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(0, 100)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if shown:
        axes.legend(frameon=False, loc="lower right")
    _save(figure, path)


def participation_figure(path: Path, seen: Sequence[tuple[int, np.ndarray]], shown: np.ndarray) -> None:
    """Draw the number of participants per round, and below it which of the ``shown`` nodes took part in which round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 5.4), dpi=130, layout="constrained")
    top, raster = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    rounds = np.arange(1, len(seen) + 1)
    counts = np.array([count for count, _ in seen])
    top.step(rounds, counts, where="mid", color=BLUE, linewidth=0.8)
    top.axhline(counts.mean(), color=ORANGE, linewidth=1, linestyle="--")
    top.annotate(
        f"mean {counts.mean():.1f}", (1, counts.mean()), xycoords=("axes fraction", "data"), color=ORANGE,
        xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, annotation_clip=False,
    )  # fmt: skip
    top.set_ylabel("participants")
    top.set_ylim(bottom=0)
    # Many rounds share a column: a cell is the share of its rounds in which the node took part.
    columns = min(len(seen), 600)
    cells = np.zeros((len(shown), columns))
    width = np.zeros(columns)
    for t, (_, rows) in enumerate(seen):
        column = t * columns // len(seen)
        cells[rows, column] += 1
        width[column] += 1
    extent = (0.5, len(seen) + 0.5, len(shown) - 0.5, -0.5)
    raster.imshow(cells / width, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest", extent=extent)
    _name_rows(raster, shown, 6)
    top.yaxis.get_major_locator().set_params(integer=True)
    raster.set_xlabel("round")
    raster.set_ylabel("node")
    for axes in (top, raster):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def partition_figure(path: Path, class_counts: np.ndarray) -> None:
    """Draw who holds which classes: nodes x classes (K, C), and each node's number of examples beside it.

    More than 200 nodes are shown as 200 evenly chosen ones.
    """
    from matplotlib.figure import Figure

    nodes = np.unique(np.linspace(0, len(class_counts) - 1, min(len(class_counts), 200)).astype(int))
    counts = class_counts[nodes]
    height = float(np.clip(1.6 + 0.085 * len(nodes), 3.6, 9))
    figure = Figure(figsize=(7.2, height), dpi=130, layout="constrained")
    grid, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    extent = (-0.5, counts.shape[1] - 0.5, len(nodes) - 0.5, -0.5)
    masked = np.ma.masked_equal(counts, 0)
    image = grid.imshow(masked, aspect="auto", cmap="viridis_r", interpolation="nearest", extent=extent, norm="log")
    grid.set_xlabel("class")
    grid.set_ylabel("node" if len(nodes) == len(class_counts) else f"node ({len(nodes)} of {len(class_counts)} shown)")
    _name_rows(grid, nodes, 11)
    if counts.shape[1] <= 20:
        grid.set_xticks(range(counts.shape[1]))
    figure.colorbar(image, ax=grid, label="examples", location="top", shrink=0.6, aspect=30)
    sizes.barh(np.arange(len(nodes)), counts.sum(1), height=0.8, color=BLUE)
    sizes.set_xlabel("examples in all")
    sizes.tick_params(left=False)
    for axes in (grid, sizes):
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _name_rows(axes: Any, names: np.ndarray, most: int) -> None:
    """Label about ``most`` rows with the node each stands for, at round steps."""
    step = next(s for s in (1, 2, 5, 10, 20, 25, 50, 100) if len(names) / s <= most)
    ticks = np.arange(0, len(names), step)
    axes.set_yticks(ticks, [str(names[i]) for i in ticks])


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    # The Agg canvas is what savefig picks for a Figure that no window owns.
    figure.savefig(path)
