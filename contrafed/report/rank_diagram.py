"""The critical-difference diagram: methods on an axis of mean ranks, bars over those that do not differ (Demsar 2006)."""

import math
from typing import Any

from matplotlib.figure import Figure

from contrafed.report.plots import head, wrap_title
from contrafed.report.statistics import Ranking

WIDTH, ROW = 7.2, 0.24  # inches
MAX_TICKS = 12
BAR = 0.32  # between two bars, in rows
LETTER = 0.6  # mean width of a letter, as a share of the text's size
WIDEST = 0.3  # share of the figure's width that a label may have
EDGE = 0.04  # distance of a label from the axis, as a share of the axis


def draw_rank_diagram(ranking: Ranking, title: str, width: float = WIDTH, points: float = 9) -> Figure:
    """Draw the mean ranks, the best at the left. A thick bar joins methods whose ranks do not differ significantly.

    Args:
        ranking: The mean ranks. Long names are in several lines.
        title: Title of the figure, empty for none.
        width: In inches.
        points: Size of the text.
    """
    letter = LETTER * points / 72 / width
    names = [wrap_title(f"{name} ({rank:.2f})", WIDEST / letter) for name, rank in ranking.ranks.items()]
    widest = letter * max(len(line) for name in names for line in name.splitlines())
    step = max(0.7 * (name.count("\n") + 1) + 0.3 for name in names)  # between two labels, in rows
    left = math.ceil(len(names) / 2)
    first = 1.0 + BAR * len(ranking.cliques)
    bottom = first + step * left
    figure = Figure(figsize=(width, (1.5 + ROW * bottom) * points / 9), layout="constrained")
    if title:
        head(figure, title)
    axes = figure.subplots()
    low, high = 1, len(names)
    for number, (name, rank) in enumerate(zip(names, ranking.ranks.values(), strict=True)):
        is_left = number < left
        row = first + step * (number if is_left else len(names) - 1 - number)
        edge = low - EDGE * (high - low) if is_left else high + EDGE * (high - low)
        axes.plot([rank, rank, edge], [0, row, row], color="black", linewidth=0.8, clip_on=False)
        gap = (-0.01 if is_left else 0.01) * (high - low)
        axes.text(edge + gap, row, name, ha="right" if is_left else "left", va="center", fontsize=points)
    for number, (start, end) in enumerate(ranking.cliques):
        row = 0.5 + BAR * number
        axes.plot([start - 0.006 * high, end + 0.006 * high], [row, row], color="black", linewidth=3.5, solid_capstyle="butt")
    end = low + ranking.critical_difference
    _draw_scale(axes, low, high, end, points)
    span = max(high, end) - low
    room = (widest * span + 1.5 * EDGE * (high - low)) / (1 - 2 * widest)  # a label has ``widest`` of the whole width
    axes.set_xlim(low - room, low + span + room)
    axes.set_ylim(bottom - 0.4, -3.2)
    return figure


def _draw_scale(axes: Any, low: int, high: int, end: float, points: float) -> None:
    """Draw the axis of ranks from ``low`` to ``high``, and above it the critical difference from ``low`` to ``end``."""
    axes.plot([low, end], [-2.0, -2.0], color="black", linewidth=1.2, marker="|", markersize=7, clip_on=False)
    said = f"critical difference {end - low:.2f}"
    axes.text((low + end) / 2, -2.2, said, ha="center", va="bottom", fontsize=points)
    axes.plot([low, high], [0, 0], color="black", linewidth=1)
    for rank in range(low, high + 1, math.ceil(high / MAX_TICKS)):
        axes.plot([rank, rank], [0, -0.3], color="black", linewidth=1)
        axes.text(rank, -0.45, str(rank), ha="center", va="bottom", fontsize=points)
    axes.spines[:].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
