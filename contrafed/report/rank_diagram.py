"""The critical-difference diagram: methods on an axis of mean ranks, bars over those that do not differ (Demsar 2006)."""

import math

from matplotlib.figure import Figure

from contrafed.report.plots import as_written, head
from contrafed.report.statistics import Ranking

WIDTH, ROW = 7.2, 0.24  # inches
MAX_TICKS = 12
BAR = 0.32  # between two bars, in rows


def draw_rank_diagram(ranking: Ranking, title: str, width: float = WIDTH, points: float = 9) -> Figure:
    """Draw the mean ranks, the best at the left. A thick bar joins methods whose ranks do not differ significantly.

    Args:
        ranking: The mean ranks.
        title: Title of the figure, empty for none.
        width: In inches.
        points: Size of the text.
    """
    names = list(ranking.ranks)
    left = math.ceil(len(names) / 2)
    first = 1.0 + BAR * len(ranking.cliques)
    figure = Figure(figsize=(width, (1.5 + ROW * (left + first)) * points / 9), layout="constrained")
    if title:
        head(figure, title)
    axes = figure.subplots()
    low, high = 1, len(names)
    room = 0.42 * (high - low)
    for number, (name, rank) in enumerate(ranking.ranks.items()):
        is_left = number < left
        row = first + (number if is_left else len(names) - 1 - number)
        edge = low - 0.04 * (high - low) if is_left else high + 0.04 * (high - low)
        axes.plot([rank, rank, edge], [0, row, row], color="black", linewidth=0.8, clip_on=False)
        align = "right" if is_left else "left"
        step = -0.01 * (high - low) if is_left else 0.01 * (high - low)
        axes.text(edge + step, row, f"{as_written(name)} ({rank:.2f})", ha=align, va="center", fontsize=points)
    for number, (start, end) in enumerate(ranking.cliques):
        row = 0.5 + BAR * number
        axes.plot([start - 0.006 * high, end + 0.006 * high], [row, row], color="black", linewidth=3.5, solid_capstyle="butt")
    end = low + ranking.critical_difference
    axes.plot([low, end], [-2.0, -2.0], color="black", linewidth=1.2, marker="|", markersize=7, clip_on=False)
    axes.text(
        (low + end) / 2,
        -2.2,
        f"critical difference {ranking.critical_difference:.2f}",
        ha="center",
        va="bottom",
        fontsize=points,
    )
    axes.set_xlim(low - room, max(high, end) + room)
    axes.set_ylim(first + left - 0.4, -3.2)
    axes.spines[:].set_visible(False)
    axes.plot([low, high], [0, 0], color="black", linewidth=1)
    for rank in range(low, high + 1, math.ceil(high / MAX_TICKS)):
        axes.plot([rank, rank], [0, -0.3], color="black", linewidth=1)
        axes.text(rank, -0.45, str(rank), ha="center", va="bottom", fontsize=points)
    axes.set_xticks([])
    axes.set_yticks([])
    return figure
