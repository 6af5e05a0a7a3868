"""Show simulated time: curves of several seeds on one axis of seconds, and who waits for whom."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from contrafed.core.display_names import name_label
from contrafed.report import plots
from contrafed.report.runs import FinishedRun
from contrafed.report.style import styles

TimePoints = list[tuple[float, float]]
WAITING_COLOUR = "#d0d0d0"


def align_seeds(seeds: Sequence[TimePoints]) -> list[TimePoints]:
    """Return curves of seeds, each with the moments of all: a seed's value is the last one until a moment.

    They begin when every seed has a value, and end with the first seed that ends.
    """
    seeds = [seed for seed in seeds if seed]
    if not seeds:
        return []
    first, last = max(seed[0][0] for seed in seeds), min(seed[-1][0] for seed in seeds)
    moments = sorted({t for seed in seeds for t, _ in seed if first <= t <= last})
    times = [[t for t, _ in seed] for seed in seeds]
    return [[(t, seed[bisect_right(own, t) - 1][1]) for t in moments] for seed, own in zip(seeds, times, strict=True)]


def waits_of(run: FinishedRun) -> dict[int, tuple[float, float]]:
    """Return {client: (seconds at work, seconds of waiting)}, sums over its rounds.

    A client waits from its reply to the end of the round. The result is empty for a run of ``results``, which has no rounds.
    It is also empty with ``schedule=buffered``, because no client waits for others.
    """
    if run.config.get("schedule", {}).get("name") == "buffered":
        return {}
    lengths, table = dict(run.points("global", "time", "simulated_seconds")), run.of_clients("simulated_seconds")
    if not lengths or table.empty:
        return {}
    waited = (table["round"].map(lengths) - table["value"]).clip(lower=0)
    sums = table.assign(waited=waited).groupby("client")[["value", "waited"]].sum()
    return {int(client): (row["value"], row["waited"]) for client, row in sums.iterrows()}


def draw_waits(values: Mapping[str, Mapping[int, tuple[float, float]]], title: str) -> Figure:
    """Draw each client's seconds at work and of waiting as stacked bars, a row per label. The slowest clients come first."""
    look = styles(list(values))
    titles = [f"{name_label(label)}: {_share(waits):.0f} % of the time is waiting" for label, waits in values.items()]
    figure, rows = plots.stack_rows(titles, title, sharex=False)
    for axes, (label, waits) in zip(rows, values.items(), strict=True):
        _draw_row(axes, waits, look[label].colour)
    rows[-1].set_xlabel("client, the longest at work first")
    figure.supylabel("simulated seconds", fontsize=10)
    colours = dict.fromkeys(look[label].colour for label in values)
    handles: list[Any] = [tuple(Patch(color=colour) for colour in colours), Patch(color=WAITING_COLOUR)]
    figure.legend(
        handles, ["at work", "waiting"], handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, frameon=False, fontsize=9,
        loc="outside lower center", ncols=2,
    )  # fmt: skip
    return figure


def _share(waits: Mapping[int, tuple[float, float]]) -> float:
    """Return the percentage of the clients' time that is waiting."""
    work, waited = (sum(times) for times in zip(*waits.values(), strict=True))
    return 100 * waited / max(work + waited, 1e-300)


def _draw_row(axes: Any, waits: Mapping[int, tuple[float, float]], colour: str) -> None:
    clients = sorted(waits, key=lambda client: (-waits[client][0], client))
    work, waited = ([waits[client][part] for client in clients] for part in (0, 1))
    width = 0.85 if len(clients) <= 60 else 1
    axes.bar(range(len(clients)), work, width=width, color=colour)
    axes.bar(range(len(clients)), waited, width=width, bottom=work, color=WAITING_COLOUR)
    few = len(clients) <= 25
    axes.set_xticks(range(len(clients)) if few else [], [str(client) for client in clients] if few else [])
