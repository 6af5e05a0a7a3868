"""Draw the figures of a run without a display and without matplotlib's global state."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.runs.output.series import Curves, moving_average, shown_clients, split_tuned

# Okabe and Ito's colours, which colour-blind readers can distinguish too.
BLUE, ORANGE, GREEN, GREY, SKY, YELLOW = "#0072B2", "#D55E00", "#009E73", "#666666", "#56B4E9", "#E69F00"

# From this number of points on, a curve is drawn as its moving average over the window, with pale points behind it. FedRCL
# smooths its curves over 20.
MANY_POINTS, WINDOW = 100, 20


def accuracy_figure(path: Path, curves: Curves, note: str = "", title: str = "") -> None:
    """Draw accuracy against round: the global model on test and training data, and personal models with their spread.

    Args:
        path: The file.
        curves: {(scope, split, metric): points (round, value)}.
        note: A notice below the figure.
        title: What was run.
    """
    figure = _figure(4.2)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    shown = 0
    kinds = (
        ("global", "test", BLUE, "global model, test"),
        ("global", "train", GREY, "global model, training data"),
        ("global", "clients", GREEN, "global model, clients' own test parts"),
        ("personal", "test", ORANGE, "personal models, own test parts"),
        ("global", "validation", SKY, "global model, validation"),
        ("personal", "validation", YELLOW, "personal models, own validation parts"),
    )
    for scope, split, colour, kind in kinds:
        points, tuned = split_tuned(*(curves.get((scope, split, name), ()) for name in ("accuracy", "untuned/accuracy")))
        if not points:
            continue
        shown += 1
        rounds, values = zip(*points, strict=True)
        drawn, smooth, label = 100 * np.array(values), len(points) >= MANY_POINTS, kind
        if smooth:
            axes.plot(rounds, drawn, color=colour, alpha=0.25, linewidth=0.6)
            drawn, label = np.array(moving_average(drawn.tolist(), WINDOW)), f"{label} (mean of {WINDOW})"
        dots = {"marker": "o", "markersize": 3.5} if len(points) <= 25 else {}
        axes.plot(rounds, drawn, color=colour, label=label, linewidth=1.6, clip_on=smooth, **dots)
        if tuned:
            axes.plot(tuned[0][0], 100 * tuned[0][1], "D", color=colour, label=f"{kind}, fine-tuned", clip_on=False)
        spread, _ = split_tuned(*(curves.get((scope, split, name), ()) for name in ("accuracy_std", "untuned/accuracy_std")))
        if len(spread) == len(points):
            width = 100 * np.array([value for _, value in spread])
            if smooth:
                width = np.array(moving_average(width.tolist(), WINDOW))
            axes.fill_between(rounds, drawn - width, drawn + width, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("round")
    axes.set_ylabel("accuracy (%)")
    axes.set_ylim(0, 100)
    ends = [points[-1][0] for (_, _, name), points in curves.items() if name == "accuracy" and points]
    axes.set_xlim(0, max([1, *ends]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    if shown:  # above the curves, so that it never covers them
        figure.legend(
            frameon=False,
            loc="outside upper left",
            ncols=2,
            alignment="left",
            title=_as_written(title) or None,
            title_fontsize=9,
        )
    _save(figure, path, note, "" if shown else title)


def participation_figure(
    path: Path, seen: Sequence[tuple[int, np.ndarray]], shown: np.ndarray, note: str = "", title: str = ""
) -> None:
    """Draw the number of participants per round, and below it the rounds of each of the ``shown`` clients."""
    figure = _figure(5.4)
    show_participation(figure, seen, shown)
    _save(figure, path, note, title)


def show_participation(figure: Any, seen: Sequence[tuple[int, np.ndarray]], shown: np.ndarray) -> None:
    """Draw ``participation_figure`` into an empty figure or a part of one.

    Args:
        figure: The figure.
        seen: For each round, the number of participants, and the positions in ``shown`` of those that are shown.
        shown: The clients in the figure (n,).
    """
    top, raster = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.4))
    counts = np.array([count for count, _ in seen])
    top.stairs(counts, np.arange(len(seen) + 1) + 0.5, baseline=None, color=BLUE, linewidth=1.2 if len(seen) <= 200 else 0.6)
    top.axhline(counts.mean(), color=ORANGE, linewidth=1, linestyle="--")
    mean = counts.mean()
    top.annotate(
        f"mean {mean:,.{0 if mean >= 1000 else 1}f}", (1, mean), xycoords=("axes fraction", "data"), color=ORANGE,
        xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, annotation_clip=False,
    )  # fmt: skip
    top.set_ylabel("participants")
    top.set_ylim(bottom=0)
    # Many rounds share a column. A cell is the share of its rounds with this client.
    columns = min(len(seen), 600)
    cells = np.zeros((len(shown), columns))
    width = np.zeros(columns)
    for t, (_, rows) in enumerate(seen):
        column = t * columns // len(seen)
        cells[rows, column] += 1
        width[column] += 1
    extent = (0.5, len(seen) + 0.5, len(shown) - 0.5, -0.5)
    shares = cells / width
    # the darkest colour is the largest share, because a client rarely participates in all rounds of a column
    most = shares.max() or 1
    raster.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=most, interpolation="nearest", extent=extent)
    total = int(shown[-1]) + 1  # the chosen clients include the last one
    _name_rows(raster, shown, 6)
    top.yaxis.get_major_locator().set_params(integer=True)
    raster.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    raster.set_xlabel("round" if columns == len(seen) else "round (darker: more of the neighbouring rounds)")
    raster.set_ylabel("client" if len(shown) == total else f"client ({len(shown)} of {total} shown)")
    for axes in (top, raster):
        axes.spines[["top", "right"]].set_visible(False)


def partition_figure(path: Path, class_counts: np.ndarray, note: str = "", title: str = "") -> None:
    """Draw the partition: clients x classes (K, C), and next to it each client's number of examples.

    More than 200 clients are shown as 200 evenly chosen ones. A class that a client does not have is white.
    """
    figure = _figure(float(np.clip(1.6 + 0.085 * len(shown_clients(len(class_counts))), 3.6, 9)))
    show_partition(figure, class_counts)
    _save(figure, path, note, title)


def show_partition(figure: Any, class_counts: np.ndarray) -> None:
    """Draw ``partition_figure`` of counts (K, C) into an empty figure or a part of one."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap, LogNorm
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    total = len(class_counts)
    clients = shown_clients(total)
    counts = class_counts[clients]
    grid, sizes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    extent = (-0.5, counts.shape[1] - 0.5, len(clients) - 0.5, -0.5)
    # From a blue that is visible on white. Logarithmic, because counts span orders of magnitude.
    blues = LinearSegmentedColormap.from_list("blues", ["#b3d3ea", "#4292c6", "#08306b"])
    most = max(2, int(counts.max(initial=0)))
    norm = LogNorm(1, most)
    masked = np.ma.masked_equal(counts, 0)
    grid.imshow(masked, aspect="auto", cmap=blues, interpolation="nearest", extent=extent, norm=norm)
    grid.set_xlabel("class")
    grid.set_ylabel("client" if len(clients) == total else f"client ({len(clients)} of {total} shown)")
    _name_rows(grid, clients, 11)
    if counts.shape[1] <= 20:
        grid.set_xticks(range(counts.shape[1]))
    scale = ScalarMappable(norm, blues)
    bar = figure.colorbar(scale, ax=grid, label="examples", location="top", shrink=0.6, aspect=30, pad=0.02)
    base = 10 if most >= 50 else 2
    bar.ax.xaxis.set(major_locator=LogLocator(base), minor_locator=NullLocator(), minor_formatter=NullFormatter())
    bar.ax.xaxis.set_major_formatter("{x:g}")
    # Bars that touch, because bars thinner than pixels would show a false pattern.
    sizes.barh(np.arange(len(clients)), counts.sum(1), height=0.8 if len(clients) <= 50 else 1, color=BLUE)
    sizes.set_xlabel("examples in all")
    sizes.set_xlim(left=0)
    sizes.tick_params(left=False)
    for axes in (grid, sizes):
        axes.spines[["top", "right"]].set_visible(False)


def _name_rows(axes: Any, names: np.ndarray, most: int) -> None:
    """Label about ``most`` rows at round client numbers. ``names`` are the clients of the rows, ascending."""
    last = int(names[-1])
    step = next(m * 10**e for e in range(20) for m in (1, 2, 5) if last < m * 10**e * most)
    ticks = np.arange(0, last + 1, step)
    axes.set_yticks(np.interp(ticks, names, np.arange(len(names))), [str(tick) for tick in ticks])


def _figure(height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(7.2, height), dpi=130, layout="constrained")


def _as_written(title: str) -> str:
    return title.replace("$", r"\$")  # of a name of the user's, which begins no formula


def _save(figure: Any, path: Path, note: str, title: str) -> None:
    if title:
        figure.suptitle(_as_written(title), x=0.01, ha="left", fontsize=9)
    if note:
        figure.supxlabel(note, fontsize=8, color=ORANGE)
    # For a Figure without a window savefig uses the Agg canvas.
    figure.savefig(path)
