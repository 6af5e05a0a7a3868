"""Draw figures: each kind is one function on a pair of axes, and all kinds share a grid of panels.

A method has one colour, line style and marker in all of them. Every figure is written as PNG and PDF.
"""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy import stats

from contrafed.core.display_names import name_label
from contrafed.report.groups import number_of
from contrafed.report.statistics import band, over_seeds
from contrafed.report.style import Style, distinct_styles, method_of, styles
from contrafed.runs.output.figures import MANY_POINTS
from contrafed.runs.output.series import moving_average

Look = Mapping[str, Style]
Panels = Mapping[str, Mapping[Any, Any]]

# Inches of a single panel, which fills a page's width, and of one of several.
ALONE, ONE_OF_SEVERAL = (7.2, 4.2), (3.9, 3.3)
# Characters of a title per inch.
TITLE_LETTERS_PER_INCH = 13
# Height of one more line of a row's title.
TITLE_LINE_INCHES = 0.16
# Panels in a row, labels in a column of a legend, and approximate number of markers on a curve.
ACROSS, ONE_COLUMN, MARKS = 3, 18, 8
NEAR = 0.04  # distance of two ticks, as a share of the axis, at which their numbers overlap
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}
# Of the settings in ``dots``.
MARKERS = "os^DvPX*<>hp"
SIGNS = "●■▲◆▼✚✖★◀▶⬢⬟"  # the same in a text


def save(figure: Figure, stem: Path, dpi: int = 160) -> list[Path]:
    """Write ``stem.png`` and ``stem.pdf``, the same bytes for the same figure, and return their paths.

    Args:
        figure: The figure.
        stem: The files without their ending.
        dpi: Dots per inch of the PNG.
    """
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "pdf")]
    with rc_context({"pdf.fonttype": 42}):  # fonts that other programs can read
        for path in paths:
            figure.savefig(path, dpi=dpi, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths


def draw(
    kind: str, panels: Panels, title: str, xlabel: str, ylabel: str, method: str | None = None, window: int | None = None
) -> Figure:
    """Return a figure with a panel for each entry of {title: data}.

    Args:
        kind: One of ``KINDS``, which defines the form of the data.
        panels: {title: data}.
        title: Title of the figure.
        xlabel: Label of the x axes.
        ylabel: Label of the y axes.
        method: The method of all labels, if they name something else, such as values of a key.
        window: If a curve has 100 points, all curves are moving averages over this number of points. None for none.
    """
    labels = list(dict.fromkeys(label for data in panels.values() for label in data))
    look: Look = {}
    if kind != "heatmap":  # whose labels are pairs of values
        alone = len({method_of(label) for label in labels}) == 1 and len(labels) > 1
        look = distinct_styles(labels) if alone else styles(labels, None if method is None else [method] * len(labels))
    one = partial(heat_map, cells_of_all=panels.values()) if kind == "heatmap" else KINDS[kind]
    many = kind == "curves" and any(len(band(seeds)[0]) >= MANY_POINTS for data in panels.values() for seeds in data.values())
    window = window if many else None
    if window is not None:
        one = partial(curves, window=window)
    across = min(ACROSS, len(panels))
    down = math.ceil(len(panels) / across)
    width, height = _size(kind, labels, panels) if len(panels) == 1 else (across * ONE_OF_SEVERAL[0], down * ONE_OF_SEVERAL[1])
    figure = Figure(figsize=(width, height + 0.2), layout="constrained")
    head(figure, title)
    every = list(figure.subplots(down, across, squeeze=False, sharey=kind in ("curves", "lines", "bars", "box")).flat)
    for axes, (panel, data) in zip(every, panels.items(), strict=False):
        one(axes, data, look)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(_lines(panel, figure.get_figwidth() / across), fontsize=10)
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    figure.supxlabel(xlabel + (f" (means of {window} points)" if window else ""), fontsize=10)
    figure.supylabel(ylabel, fontsize=10)
    if kind in ("curves", "lines", "cdf") and len(labels) > 1:
        columns = math.ceil(len(labels) / ONE_COLUMN)
        handles = {label: handle for axes in every for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        names = [name_label(label) for label in handles]
        figure.legend(
            handles.values(),
            names,
            frameon=False,
            fontsize=9,
            loc="outside right upper",
            ncols=columns,
            handlelength=3.2,
        )
        figure.set_figwidth(width + (0.9 + 0.075 * max(map(len, names))) * columns)
    return figure


def head(figure: Figure, title: str) -> None:
    """Write the title in lines as wide as the panels. Call it before a legend widens the figure."""
    figure.suptitle(_lines(title, figure.get_figwidth()), x=0.01, ha="left", fontsize=10)


def stack_rows(titles: Sequence[str], title: str, sharex: bool) -> tuple[Figure, list[Any]]:
    """Return a figure and its rows of axes, which share their y axis. A title of several lines makes the figure higher.

    Args:
        titles: The rows' titles.
        title: Title of the figure.
        sharex: Whether the rows share their x axis.
    """
    width = ALONE[0]
    wrapped = [_lines(each, 0.95 * width) for each in titles]
    more = sum(each.count("\n") for each in (*wrapped, _lines(title, width)))
    figure = Figure(figsize=(width, 0.8 + 1.25 * len(titles) + more * TITLE_LINE_INCHES), layout="constrained")
    head(figure, title)
    rows = list(figure.subplots(len(titles), 1, sharex=sharex, sharey=True, squeeze=False)[:, 0])
    for axes, each in zip(rows, wrapped, strict=True):
        axes.set_title(each, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    return figure, rows


def _lines(text: str, width: float) -> str:
    """Return a title in lines that fit into ``width`` inches."""
    return wrap_title(text, TITLE_LETTERS_PER_INCH * width)


def wrap_title(text: str, letters: float) -> str:
    """Return a title in lines of at most about this many characters."""
    return as_written("\n".join(textwrap.wrap(text, max(8, int(letters)), break_long_words=False, break_on_hyphens=False)))


def as_written(text: str) -> str:
    """Return a text with $ as a character, such as in a folder's name, so that it begins no formula."""
    return text.replace("$", r"\$")


def _size(kind: str, labels: Sequence[str], panels: Panels) -> tuple[float, float]:
    if kind in ("bars", "box"):
        return max(4.5, 1.5 + 0.65 * len(labels)), ALONE[1]
    if kind == "heatmap":
        cells = next(iter(panels.values()))
        rows, columns = (len({key[axis] for key in cells}) for axis in (0, 1))
        return max(4.2, 2.2 + 0.62 * columns), max(2.6, 1.4 + 0.36 * rows)
    return ALONE


def curves(axes: Any, series: Mapping[str, Sequence[Any]], look: Look, window: int | None = None) -> None:
    """Draw {label: points (round, value) of each seed}: the mean over seeds, with its standard deviation as a band.

    With ``window`` they are moving averages over this number of points.
    """
    for label, seeds in series.items():
        rounds, mean, deviation = band(seeds)
        if not len(rounds):
            continue
        style = look[label]
        if window is not None:
            mean, deviation = (np.array(moving_average(part.tolist(), window)) for part in (mean, deviation))
        axes.plot(
            rounds, mean, color=style.colour, linestyle=style.line, marker=style.marker, markevery=max(1, len(rounds) // MARKS),
            markersize=4.5, linewidth=1.5, label=label, markeredgecolor="white", markeredgewidth=0.5,
        )  # fmt: skip
        if deviation.any():
            axes.fill_between(rounds, mean - deviation, mean + deviation, color=style.colour, alpha=0.18, linewidth=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if len(lone := {float(x) for line in axes.lines for x in line.get_xdata()}) == 1:
        axes.set_xticks(sorted(lone), [f"{x:g}" for x in lone])
    axes.grid(axis="y", **GRID)


def client_cdf(axes: Any, values: Mapping[str, Sequence[float]], look: Look) -> None:
    """Draw {label: value of each client}: the share of clients with a value of at most x (PMFL Figure 5).

    A client without a finite value, such as a diverged client's loss, counts as above every x.
    """
    for label, numbers in values.items():
        if finite := [number for number in numbers if math.isfinite(number)]:
            cdf, style = stats.ecdf(finite).cdf, look[label]
            x, share = cdf.quantiles, cdf.probabilities * (len(finite) / len(numbers))
            axes.step(
                np.r_[x[0], x], np.r_[0, share], where="post", color=style.colour, linestyle=style.line, label=label,
                marker=style.marker, markevery=max(1, len(x) // MARKS), markersize=4.5,
            )  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.grid(**GRID)


def lines(axes: Any, series: Mapping[str, Mapping[float, Sequence[float]]], look: Look) -> None:
    """Draw {label: {x: values of each seed}}, mean and standard deviation: a swept key against a number."""
    for label, table in series.items():
        x, style = sorted(table), look[label]
        mean, deviation = zip(*(over_seeds(table[at]) for at in x), strict=True)
        axes.errorbar(
            x, mean, yerr=np.nan_to_num(deviation) if np.isfinite(deviation).any() else None, color=style.colour,
            linestyle=style.line, marker=style.marker, markersize=5, linewidth=1.5, capsize=3, label=label,
        )  # fmt: skip
    every = sorted({x for table in series.values() for x in table})
    if len(every) > 2 and every[0] > 0 and (every[-1] / every[0] >= 50 or np.diff(every).min() < NEAR * (every[-1] - every[0])):
        axes.set_xscale("log")
    axes.set_xticks(every, [f"{x:g}" for x in every])
    axes.minorticks_off()
    axes.grid(axis="y", **GRID)


def heat_map(
    axes: Any, cells: Mapping[tuple[str, str], float], look: Look, cells_of_all: Iterable[Mapping[tuple[str, str], float]] = ()
) -> None:
    """Draw {(row, column): value} with each number in its cell. A missing cell stays white, and numbers ascend along the axes.

    ``cells_of_all`` are all panels, which share rows, columns and colours.
    """
    every = [*cells_of_all] or [cells]
    rows, columns = (sorted(dict.fromkeys(key[axis] for table in every for key in table), key=number_of) for axis in (0, 1))
    known = [value for table in every for value in table.values() if not math.isnan(value)] or [0.0]
    low, high, middle = min(known), max(known), (min(known) + max(known)) / 2
    values = np.array([[cells.get((row, column), math.nan) for column in columns] for row in rows])
    axes.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", vmin=low, vmax=high)
    for (i, j), value in np.ndenumerate(values):
        if not math.isnan(value):
            colour = "white" if value < middle or low == high else "black"
            axes.text(j, i, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)


def boxes(axes: Any, values: Mapping[str, Sequence[float]], look: Look) -> None:
    """Draw {label: value of each seed}: quartiles and median, whiskers to the extremes, each seed as a dot."""
    drawn = axes.boxplot(list(values.values()), whis=(0, 100), widths=0.55, patch_artist=True, medianprops={"color": "black"})
    for number, (box, (label, numbers)) in enumerate(zip(drawn["boxes"], values.items(), strict=True), start=1):
        box.set(facecolor=look[label].colour, alpha=0.45, hatch=look[label].hatch)
        axes.plot([number] * len(numbers), numbers, "o", color=look[label].colour, markersize=4, markeredgecolor="white")
    _name_columns(axes, list(values))


def bars(axes: Any, values: Mapping[str, Sequence[float]], look: Look) -> None:
    """Draw {label: value of each seed}: a bar of the mean, with the standard deviation."""
    for number, (label, numbers) in enumerate(values.items(), start=1):
        mean, deviation = over_seeds(numbers)
        axes.bar(
            number, mean, yerr=None if math.isnan(deviation) else deviation, capsize=3, color=look[label].colour,
            hatch=look[label].hatch, edgecolor="white",
        )  # fmt: skip
    _name_columns(axes, list(values))


def _name_columns(axes: Any, labels: Sequence[str]) -> None:
    labels = [name_label(label) for label in labels]
    slanted = len(labels) > 4 or max(map(len, labels)) > 10
    axes.set_xticks(range(1, len(labels) + 1), labels, rotation=35 if slanted else 0, ha="right" if slanted else "center")
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


KINDS: dict[str, Callable[[Any, Any, Look], None]] = {
    "curves": curves,
    "cdf": client_cdf,
    "lines": lines,
    "heatmap": heat_map,
    "box": boxes,
    "bars": bars,
}


def client_bars(values: Mapping[str, Mapping[int, float]], title: str, ylabel: str) -> Figure:
    """Draw a bar per client, {label: {client: value}}, a row per label. Clients are in the order of the first label's
    values.
    """
    look, labels = styles(list(values)), list(values)
    first = values[labels[0]]
    clients = sorted(set().union(*values.values()), key=lambda client: (-first.get(client, -math.inf), client))
    heights = {label: [values[label].get(client, math.nan) for client in clients] for label in labels}
    means = {label: float(np.nanmean(heights[label])) for label in labels}
    titles = [f"{name_label(label)}, mean over clients {means[label]:.4g}" for label in labels]
    figure, rows = stack_rows(titles, title, sharex=True)
    for axes, label in zip(rows, labels, strict=True):
        axes.bar(range(len(clients)), heights[label], width=0.85 if len(clients) <= 60 else 1, color=look[label].colour)
        axes.axhline(means[label], color="#444444", linewidth=1, linestyle="--")
    few = len(clients) <= 25
    rows[-1].set_xticks(range(len(clients)) if few else [], [str(client) for client in clients] if few else [])
    rows[-1].set_xlabel("client" if few else f"{len(clients)} clients, in the first picture's order")
    figure.supylabel(ylabel, fontsize=10)
    return figure


def dots(values: Mapping[str, Mapping[str, Sequence[float]]], title: str, xlabel: str) -> Figure:
    """Draw {label: {setting: values of each seed}}: a row per label, a dot per setting, and the standard deviation over seeds.

    This is for more jobs than curves can show. The label has the colour, the setting the marker. A value far below all others
    is a number with its marker at the right of the axes. Bars end at the axis.
    """
    settings = list(dict.fromkeys(setting for table in values.values() for setting in table))
    look = styles(list(values))
    means = [over_seeds(numbers)[0] for table in values.values() for numbers in table.values()]
    edge = _edge(means)
    figure = Figure(figsize=(ALONE[0], 1.5 + 0.21 * len(values)), layout="constrained")
    axes = figure.subplots()
    for row, (label, table) in enumerate(values.items()):
        below = []
        for setting, numbers in table.items():
            mean, deviation = over_seeds(numbers)
            number = settings.index(setting)
            if mean < edge:
                below.append(f"{SIGNS[number % len(SIGNS)]} {mean:.1f}" if len(settings) > 1 else f"{mean:.1f}")
                continue
            axes.errorbar(
                mean, row, xerr=None if math.isnan(deviation) else deviation, color=look[label].colour, capsize=2,
                linestyle="", **_marker(number, look[label].colour),
            )  # fmt: skip
        if below:
            right: Any = ("axes fraction", "data")
            axes.annotate(
                "  ".join(below), (1, row), xycoords=right, xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                annotation_clip=False,
            )  # fmt: skip
    axes.set_yticks(range(len(values)), [name_label(label) for label in values], fontsize=9)
    axes.set_ylim(len(values) - 0.4, -0.6)
    if shown := [max(mean, edge) for mean in means if not math.isnan(mean)]:
        room = 0.05 * (max(shown) - min(shown)) or 1
        axes.set_xlim(min(shown) - room, max(shown) + room)
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    head(figure, title)
    if len(settings) > 1:
        for number, setting in enumerate(settings):
            axes.plot([], [], linestyle="", color="#555555", label=setting, **_marker(number, "#555555"))
        figure.legend(
            *axes.get_legend_handles_labels(),
            frameon=False,
            fontsize=9,
            loc="outside lower center",
            ncols=min(4, len(settings)),
        )
    return figure


def _marker(number: int, colour: str) -> dict[str, Any]:
    """Return the marker of a setting. After all markers are used, hollow ones follow."""
    hollow = number >= len(MARKERS)
    edge = {"markerfacecolor": "white", "markeredgecolor": colour} if hollow else {"markeredgecolor": "white"}
    return {"marker": MARKERS[number % len(MARKERS)], "markersize": 6, "markeredgewidth": 1.2 if hollow else 0.5, **edge}


def _edge(means: Sequence[float]) -> float:
    """Return the start of the axis. Values more than four quartile distances below the lower quartile are excluded."""
    known = [mean for mean in means if not math.isnan(mean)]
    if len(known) < 8:
        return -math.inf
    low, high = np.percentile(known, [25, 75])
    edge = float(low - 4 * (high - low))
    return edge if min(known) < edge < low else -math.inf
