"""Choose the figures of a set of runs: a paper's figures that an experiment names, and general ones."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from contrafed.core.disk import shorten_name
from contrafed.core.display_names import NULL, name_key, name_label, name_setting
from contrafed.report import pictures, plots
from contrafed.report.csv_cells import EMPTY_CELL
from contrafed.report.experiment_keys import spread_settings
from contrafed.report.figure_data import CLIENTS, add, metrics_of, place_of, plot_of, said_of, split_tuned, unit_of, word_of
from contrafed.report.groups import Group, group_runs, number_of
from contrafed.report.published import load
from contrafed.report.runs import SIMULATED_TIME, FinishedRun, Points, accuracy_of, beside_accuracy_of, flat
from contrafed.report.statistics import over_seeds
from contrafed.report.waiting import align_seeds, draw_waits, waits_of
from contrafed.runs.output.figures import WINDOW

# Limits of lines, panels and rows of clients. Above them curves cannot be distinguished, and dots are drawn.
LINES, PANELS, CLIENT_ROWS = 16, 9, 6
# Number of seeds from which on a box shows more than mean and standard deviation.
MIN_BOX_SEEDS = 4

# Curves that are drawn over rounds if every run has them: name, curve, axis, unit.
OVER_ROUNDS: tuple[tuple[str, Callable[[FinishedRun], Points], str, float], ...] = (
    ("training", lambda run: run.points("global", "train", "accuracy"), "training accuracy (%)", 100),
    (
        "deviation",
        lambda run: run.points("global", "fit", "deviation"),
        "deviation of the updates, summed over participants",
        1,
    ),
)


def of_runs(runs: Sequence[FinishedRun], title: str) -> dict[str, Figure]:
    """Return {name: figure} for any runs: accuracy over rounds or at the end, clients, weights, swept keys, repetitions."""
    found, title = quiet(_drop_evaluations(group_runs(runs)), title)
    said, points = accuracy_of(runs)
    out = {"accuracy": accuracy(found, title, said, points)}
    scores = [(name, *accuracy_of(runs, name)) for name in beside_accuracy_of(runs)]
    for name, curve, ylabel, unit in (*OVER_ROUNDS, *((name, curve, f"{score} (%)", 100) for name, score, curve in scores)):
        if all(curve(run) for run in runs) and (drawn := _curves(found, title, ylabel, curve, unit)):
            out[name] = drawn
    out |= _over_time(found, title, said, points)
    out |= _clients(found, title) | _swept(found, title, said, points)
    if 1 < len(found) <= LINES and min(len(group.runs) for group in found) >= MIN_BOX_SEEDS:
        values = {group.label: _last(group, points) for group in found}
        out["box"] = plots.draw("box", {"": values}, title, "", f"{said}, last round (%)")
    return out


def _over_time(found: Sequence[Group], title: str, said: str, points: Callable[[FinishedRun], Points]) -> dict[str, Figure]:
    """Return accuracy over simulated time, and who waits for whom, if every run has a clock."""
    if not all(run.points(*SIMULATED_TIME) for group in found for run in group.runs):
        return {}
    out = {}
    if drawn := _curves(found, title, f"{said} (%)", points, in_time=True):
        out["accuracy_over_time"] = drawn
    waits = {group.label: waits_of(group.runs[0]) for group in found[: CLIENT_ROWS + 1]}
    if len(found) <= CLIENT_ROWS and all(waits.values()):
        out["waiting"] = draw_waits(waits, title)
    return out


def _drop_evaluations(found: Sequence[Group]) -> Sequence[Group]:
    """Return groups without ``eval_every``, which a figure does not need, if they stay different without it."""
    less = [replace(group, setting=tuple(pair for pair in group.setting if pair[0] != "eval_every")) for group in found]
    return less if len({group.label for group in less}) == len(found) else found


def quiet(found: Sequence[Group], title: str) -> tuple[list[Group], str]:
    """Shorten the labels of groups, and add what they share to the title.

    A key may have one value for all groups except those of a few methods. Only these methods name it then. For a single method
    the value of more than half of its groups is not named.
    """
    lone, one = {}, len({group.method for group in found}) == 1
    for key in dict(found[0].setting):
        of: dict[Any, set[Any]] = {}
        for number, group in enumerate(found):
            of.setdefault(dict(group.setting)[key], set()).add(number if one else group.method)
        usual = max(of, key=lambda value: len(of[value]))
        alone = all(len(methods) == 1 for value, methods in of.items() if value != usual)
        if 2 * len(of[usual]) > len(found) if one else len(of[usual]) > 1 and alone:
            lone[key] = usual
    out = []
    for group in found:
        having = flat(group.runs[0].config)  # a key that is null is named, one that the group lacks is not
        said = tuple(
            (key, NULL if value == EMPTY_CELL and key in having else value)
            for key, value in group.setting if key in lone and value != lone[key]
        )  # fmt: skip
        rest = tuple(pair for pair in group.setting if pair[0] not in lone)
        out.append(replace(group, method=replace(group, setting=said, until=None).label, setting=rest))
    usually = ", ".join(name_setting(key, str(value)) for key, value in lone.items() if value != EMPTY_CELL)
    return out, f"{title} ({usually}, unless the legend says otherwise)" if usually else title


def accuracy(found: Sequence[Group], title: str, said: str, points: Callable[[FinishedRun], Points]) -> Figure:
    """Return the one figure of all jobs: curves of accuracy with a panel per setting, or their last values as dots."""
    drawn = _curves(found, title, f"{said} (%)", points)
    if drawn is not None:
        return drawn
    table: dict[str, dict[str, list[float]]] = {}
    for group in found:
        table.setdefault(replace(group, setting=()).label, {})[_setting(group)] = _last(group, points)
    best = sorted(table, key=lambda method: -max(over_seeds(values)[0] for values in table[method].values()))
    return plots.dots({method: table[method] for method in best}, title, f"{said}, last round (%)")


def _curves(
    found: Sequence[Group],
    title: str,
    ylabel: str,
    points: Callable[[FinishedRun], Any],
    unit: float = 100,
    in_time: bool = False,
) -> Figure | None:
    """Return curves over rounds, or with ``in_time`` over simulated seconds, a panel per setting. None if there are too many.

    Keys that some methods do not have are named with the curve instead of a panel. So are all varied keys of a single method.
    """
    # The runs' own method, because ``quiet`` has added keys to a group's.
    one = len({group.runs[0].method for group in found}) == 1 and len(found) <= LINES
    apart = {key for group in found for key, value in group.setting if one or value == EMPTY_CELL}
    panels: dict[str, dict[str, Any]] = {}
    for group in found:
        panel = _setting(replace(group, setting=tuple(pair for pair in group.setting if pair[0] not in apart)))
        label = replace(group, setting=tuple(pair for pair in group.setting if pair[0] in apart)).label
        seeds: dict[str, list[list[tuple[float, float]]]] = {}
        for run in group.runs:
            for name, curve in split_tuned(run, points(run), label):
                drawn = run.over_time(curve) if in_time else curve
                seeds.setdefault(name, []).append([(t, unit * value) for t, value in drawn])
        panels.setdefault(panel, {}).update({name: align_seeds(each) if in_time else each for name, each in seeds.items()})
    if len(panels) > PANELS or max(map(len, panels.values())) > LINES:
        return None
    xlabel = "simulated seconds" if in_time else "round"
    return plots.draw("curves", panels, title, xlabel, ylabel, window=_window(panels))


def _window(panels: Mapping[str, Mapping[str, Sequence[Points]]]) -> int:
    """Return the window of moving averages: at most a twentieth of the longest curve, because means lag behind."""
    longest = max(len(seed) for curves in panels.values() for seeds in curves.values() for seed in seeds)
    return min(WINDOW, max(1, longest // WINDOW))


def _setting(group: Group) -> str:
    return ", ".join(name_setting(key, str(value)) for key, value in group.setting)


def _last(group: Group, points: Callable[[FinishedRun], Points]) -> list[float]:
    return [100 * points(run)[-1][1] for run in group.runs if points(run)]


def _clients(found: Sequence[Group], title: str) -> dict[str, Figure]:
    """Return figures of ``clients.csv``: accuracies at the end as CDF and bars, weights over rounds."""
    out: dict[str, Figure] = {}
    at_end = (
        {group.label: [run.last_of_clients("accuracy") for run in group.runs] for group in found} if len(found) <= LINES else {}
    )
    at_end = {label: own for label, values in at_end.items() if (own := [clients for clients in values if clients])}
    if at_end:
        pooled = {label: [100 * x for seed in values for x in seed.values()] for label, values in at_end.items()}
        out["clients_cdf"] = plots.draw(
            "cdf",
            {"": pooled},
            _name_single(title, pooled, found),
            "accuracy of a client on its own test part (%)",
            "share of clients",
        )
    if 1 <= len(at_end) <= CLIENT_ROWS:
        first = {label: {client: 100 * x for client, x in values[0].items()} for label, values in at_end.items()}
        seeds = "" if all(len(values) == 1 for values in at_end.values()) else ", first seed"
        out["clients"] = plots.client_bars(first, f"{title}{seeds}", "accuracy of a client (%)")
    for name, metric, ylabel in (
        ("weights", "weight", "mean weight of clients that have one"),
        ("weights_all", "weight_all", "mean weight of all clients"),
    ):
        traces = {group.label: [run.mean_over_clients(metric) for run in group.runs] for group in found[: LINES + 1]}
        traces = {label: seeds for label, seeds in traces.items() if all(seeds)}
        if traces and len(found) <= LINES:
            named = _name_single(title, traces, found)
            out[name] = plots.draw("curves", {"": traces}, named, "round", ylabel, window=_window({"": traces}))
    return out


def _name_single(title: str, shown: Mapping[str, Any], found: Sequence[Group]) -> str:
    """Return a title that names the only line of several groups, because a single line has no legend."""
    return f"{title}: {name_label(*shown)}" if len(shown) == 1 < len(found) else title


def _swept(found: Sequence[Group], title: str, said: str, points: Callable[[FinishedRun], Points]) -> dict[str, Figure]:
    """Return lines over one swept number, or a heat map of two. Nothing for other sweeps, or if a run did not end."""
    if any(group.until is not None for group in found):
        return {}
    keys = [key for key, _ in found[0].setting]
    if not 1 <= len(keys) <= 2 or not all(math.isfinite(number_of(value)) for group in found for _, value in group.setting):
        return {}
    ylabel = f"{said}, last round (%)"
    if len(keys) == 1:
        series: dict[str, dict[float, list[float]]] = {}
        for group in found:
            series.setdefault(group.method, {})[float(group.setting[0][1])] = _last(group, points)
        return {"swept": plots.draw("lines", {"": series}, title, name_key(keys[0]), ylabel)} if len(series) <= LINES else {}
    panels: dict[str, dict[tuple[str, str], float]] = {}
    for group in sorted(found, key=lambda group: [float(value) for _, value in group.setting]):
        place = (group.setting[0][1], group.setting[1][1])
        panels.setdefault(name_label(group.method), {})[place] = over_seeds(_last(group, points))[0]
    if len(panels) > PANELS:
        return {}
    return {"heat_map": plots.draw("heatmap", panels, f"{title}: {ylabel}", name_key(keys[1]), name_key(keys[0]))}


def of_papers(runs: Sequence[FinishedRun]) -> dict[str, Figure]:
    """Return {name: figure} for every paper's figure that finished runs name, separately by ``scale`` and ``changed``.

    A figure with several metrics gives one figure per metric. A name contains the changed keys only if two figures need them.
    """
    found: dict[tuple, list[FinishedRun]] = {}
    for run in spread_settings(runs):
        published = run.published_values
        if run.is_finished and published.get("figure") and published.get("plot"):
            key = (str(published["paper"]), str(published["figure"]), str(run.config.get("scale") or ""), run.changed_settings)
            found.setdefault(key, []).append(run)
    out = {}
    for (paper, number, scale, changed), members in found.items():
        small = [f"scale={scale}"] if scale else []
        said = ", ".join((*small, *changed))
        title = f"{load(paper)['paper'].iloc[0]}, Figure {number}" + (f" ({said})" if said else "")
        apart = changed if sum(key[:3] == (paper, number, scale) for key in found) > 1 else ()
        named = max(map(metrics_of, members), key=len)
        for which, metric in enumerate(named):
            if (drawn := draw_published_plot(members, which, title)) is not None:
                words = [word_of(metric)] if len(named) > 1 else []
                name = "-".join([paper, f"figure{number}", *words, *small, *apart]).replace("/", "_")
                out[shorten_name(name)] = drawn
    return out


def draw_published_plot(runs: Sequence[FinishedRun], which: int, title: str) -> Figure | None:
    """Return the figure of the ``which``-th metric that a paper's runs describe in ``published.plot`` (``conf/experiment``).

    The plot has its kind, metrics, and the dotted keys of x, line and panel. Each run has its own metrics, because methods
    without personal models are evaluated differently. A metric that is a kind of ``pictures`` is drawn as a picture.

    Returns:
        None for an unknown kind, or if no run has the metric.
    """
    plot = plot_of(runs[0])
    # In the order of x, not of folder names. A run of an earlier version may have fewer metrics.
    having = sorted((run for run in runs if which < len(metrics_of(run))), key=lambda run: number_of(place_of(run, plot).x))
    shape = metrics_of(having[0])[which]
    shape = shape if shape in pictures.KINDS else str(plot["kind"])
    of_one_seed = shape in pictures.KINDS or any(metrics_of(run)[which].startswith(CLIENTS) for run in having)
    seeds = sorted({run.config["seed"] for run in having})
    if of_one_seed and len(seeds) > 1:  # clients differ between seeds
        most = max(seeds, key=lambda seed: sum(run.config["seed"] == seed for run in having))
        title, having = f"{title}, seed {most}", [run for run in having if run.config["seed"] == most]
    if shape in pictures.KINDS:
        return pictures.draw(shape, having, title)
    if shape not in plots.KINDS:
        return None
    panels: dict[str, dict[Any, Any]] = {}
    for run in having:
        place = place_of(run, plot)
        add(panels.setdefault(place.panel, {}), shape, metrics_of(run)[which], run, runs, place)
    panels = {panel: data for panel, data in panels.items() if data}
    if not panels:
        return None
    metric = metrics_of(having[0])[which]
    said, x_said = said_of(metric), name_key(str(plot.get("x") or ""))
    if metric.startswith(CLIENTS):
        rows = {
            ", ".join(filter(None, (line, panel))): clients for panel, data in panels.items() for line, clients in data.items()
        }
        return plots.client_bars(rows, title, said)
    if shape == "heatmap":
        means = {panel: {place: over_seeds(values)[0] for place, values in data.items()} for panel, data in panels.items()}
        return plots.draw("heatmap", means, f"{title}: {said}", x_said, name_key(str(plot["line"])))
    methods = {run.method for run in runs}
    method = methods.pop() if len(methods) == 1 else None
    xlabel, ylabel = (said, "share of clients") if shape == "cdf" else (x_said, said)
    window = int(plot.get("window", WINDOW)) if unit_of(metric) == 100 else None
    return plots.draw(shape, panels, title, xlabel, ylabel, method, window)
