"""Draw figures for a paper: a given width, type of 7 to 8 points, and one colour and marker for each method of a figure."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from contrafed.report.plots import KINDS, as_written, heat_map, wrap_title
from contrafed.report.rank_diagram import draw_rank_diagram
from contrafed.report.statistics import Ranking
from contrafed.report.style import distinct_styles

MAX_CURVES, MAX_PANELS = 6, 6  # of one figure
TEXT, SMALL = 8, 7  # points: labels of axes, and all other text
POINT = 1 / 72  # inches
LETTER = 0.55 * SMALL * POINT  # inches of a character, about
NARROW = 4.5  # inches below which a row has two panels
PANEL_ASPECT = 0.72  # height to width
MAX_PANEL_HEIGHT = 2.3  # inches
PAD = 0.02  # inches around panels
LEGEND_HANDLE = 0.42  # inches of a line in the legend, with its gaps
FONTS: Any = {
    "font.size": SMALL, "axes.labelsize": TEXT, "axes.titlesize": SMALL, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL, "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "xtick.major.size": 2.5, "ytick.major.size": 2.5, "axes.titlepad": 3,
}  # fmt: skip


def draw_paper_figure(kind: str, panels: Mapping[str, Mapping[Any, Any]], xlabel: str, ylabel: str, width: float) -> Figure:
    """Return a figure without a title, which a paper has in the caption.

    Args:
        kind: One of ``plots.KINDS``.
        panels: {title: data}, at most ``MAX_PANELS``. Together they have at most ``MAX_CURVES`` labels.
        xlabel: Label of the x axes.
        ylabel: Label of the y axes.
        width: In inches.
    """
    labels = [] if kind == "heatmap" else list(dict.fromkeys(label for data in panels.values() for label in data))
    across = min(len(panels), 2 if width < NARROW else 3)
    down = math.ceil(len(panels) / across)
    is_above = len(labels) > 1 and across * down == len(panels)  # else the legend fills the place of a panel
    columns = _count_legend_columns(labels, width)
    legend = (math.ceil(len(labels) / columns) + 0.5) * 1.35 * SMALL * POINT if is_above else 0.0
    height = min(MAX_PANEL_HEIGHT, PANEL_ASPECT * width / across)
    if kind == "heatmap":
        height = max(height, 0.6 + 0.17 * len({row for cells in panels.values() for row, _ in cells}))
    with rc_context(FONTS):
        figure = Figure(figsize=(width, down * height + legend + 0.15), layout="constrained")
        figure.get_layout_engine().set(w_pad=PAD, h_pad=PAD)  # type: ignore[union-attr, call-arg]
        every = list(figure.subplots(down, across, squeeze=False, sharey=kind != "heatmap").flat)
        draw = partial(heat_map, cells_of_all=panels.values()) if kind == "heatmap" else KINDS[kind]
        look = distinct_styles(labels)
        for axes, (panel, data) in zip(every, panels.items(), strict=False):
            draw(axes, data, look)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_title(wrap_title(panel, 0.85 * width / across / LETTER))
            _thin_out(axes)
        if kind == "curves" and ylabel.endswith("(%)"):
            low, high = every[0].get_ylim()
            every[0].set_ylim(max(low, 0), min(high, 100))
        for axes in every[len(panels) :]:
            axes.axis("off")
        figure.supxlabel(as_written(xlabel), fontsize=TEXT)
        figure.supylabel(as_written(ylabel), fontsize=TEXT)
        if len(labels) > 1:
            _add_legend(figure, every, labels, None if is_above else every[-1], columns if is_above else 1)
    return figure


def _add_legend(figure: Figure, every: list[Any], labels: list[str], place: Any, columns: int) -> None:
    """Write the legend above all panels, or into the empty panel ``place``."""
    handles = {label: handle for axes in every for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [label for label in labels if label in handles]
    (place or figure).legend(
        [handles[label] for label in shown], list(map(as_written, shown)), frameon=False, handlelength=2.6, ncols=columns,
        loc="center" if place else "outside upper center", columnspacing=1.2, handletextpad=0.5, borderaxespad=0,
    )  # fmt: skip


def draw_paper_ranks(ranking: Ranking, width: float) -> Figure:
    """Return the critical-difference diagram at this width, without a title."""
    with rc_context(FONTS):
        return draw_rank_diagram(ranking, "", width, SMALL)


def _count_legend_columns(labels: list[str], width: float) -> int:
    longest = max(map(len, labels), default=1)
    fitting = max(1, int(width / (LEGEND_HANDLE + longest * LETTER)))
    rows = math.ceil(len(labels) / fitting)
    return max(1, math.ceil(len(labels) / max(1, rows)))


def _thin_out(axes: Any) -> None:
    """Make lines, markers and numbers of a panel fit a small figure."""
    for line in axes.lines:
        line.set_linewidth(min(line.get_linewidth(), 1.0))
        line.set_markersize(min(line.get_markersize(), 3.2))
        line.set_markeredgewidth(min(line.get_markeredgewidth(), 0.4))
    for bars in axes.collections:
        if isinstance(bars, LineCollection):
            bars.set_linewidth(0.8)
    for text in axes.texts:
        text.set_fontsize(SMALL)
