"""Which figures a set of runs gives: those of a paper that an experiment names, and what suits any runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from contrafed.analysis import plots
from contrafed.analysis.published import load
from contrafed.analysis.runs import (
    NOTHING,
    FinishedRun,
    Group,
    Points,
    accuracy_of,
    composition,
    flat,
    groups,
    short,
    shown,
)
from contrafed.analysis.statistics import over_seeds

# More lines in a panel than that, or more panels, nobody can tell apart: dots then.
LINES, PANELS, NODE_ROWS = 16, 9, 6
# Seeds from which on a box says more than mean and deviation.
FOR_A_BOX = 4

# What is drawn over rounds where every run has it: name, curve, axis, unit.
OVER_ROUNDS = (
    ("training", ("global", "train", "accuracy"), "training accuracy (%)", 100),
    ("deviation", ("global", "fit", "deviation"), "deviation of the updates, summed over participants", 1),
)

# Kinds that are curves; metrics of nodes, one by one; and under which name log=[...] writes a metric down.
OVER_TIME = {"weights": "curves", "traces": "curves", "dev": "curves"}
NODES = "nodes:"
LOGGED = {"weight": "weight_all", "dev": "deviation"}

SAID = {
    "accuracy_top5_mean": "test accuracy, mean of the best five",
    "train_accuracy_top5_mean": "training accuracy, mean of the best five",
    "accuracy_final": "test accuracy, last round",
    "accuracy_ema": "test accuracy, moving average",
    "personal_accuracy_best": "nodes' accuracy, best round",
    "personal_accuracy_mean": "nodes' accuracy, last round",
    "personal_accuracy_last10_mean": "nodes' accuracy, mean of the last ten",
    "global/test/accuracy": "test accuracy",
    "global/train/accuracy": "training accuracy",
    "personal/test/accuracy": "nodes' accuracy",
    "global/nodes/accuracy": "nodes' accuracy",
    "train_accuracy": "training accuracy of a node",
    "train_loss": "training loss of a node",
}


def of_runs(runs: Sequence[FinishedRun], title: str) -> dict[str, Figure]:
    """Return {name: figure} of any runs: accuracy over rounds or at the end, nodes, weights, swept keys, repetitions."""
    found, title = quiet(groups(runs), title)
    said, points = accuracy_of(runs)
    out = {"accuracy": accuracy(found, title, said, points)}
    for name, curve, ylabel, unit in OVER_ROUNDS:
        if all(run.points(*curve) for run in runs):
            drawn = _curves(found, title, ylabel, lambda run, curve=curve: run.points(*curve), unit)  # type: ignore[misc]
            out |= {name: drawn} if drawn else {}
    out |= _nodes(found, title) | _swept(found, title, said, points)
    if 1 < len(found) <= LINES and min(len(group.runs) for group in found) >= FOR_A_BOX:
        values = {group.label: _last(group, points) for group in found}
        out["box"] = plots.draw("box", {"": values}, title, "", f"{said}, last round (%)")
    return out


def quiet(found: Sequence[Group], title: str) -> tuple[list[Group], str]:
    """Return groups and title in which a key that but for single methods is the same everywhere is said with these alone."""
    lone = {}
    for key in dict(found[0].setting):
        of: dict[Any, set[str]] = {}
        for group in found:
            of.setdefault(dict(group.setting)[key], set()).add(group.method)
        usual = max(of, key=lambda value: len(of[value]))
        if len(of[usual]) > 1 and all(len(methods) == 1 for value, methods in of.items() if value != usual):
            lone[key] = usual
    out = []
    for group in found:
        said = tuple(pair for pair in group.setting if pair[0] in lone and pair[1] != lone[pair[0]])
        rest = tuple(pair for pair in group.setting if pair[0] not in lone)
        out.append(replace(group, method=replace(group, setting=said, until=None).label, setting=rest))
    usually = ", ".join(f"{short(key)}={value}" for key, value in lone.items() if value != NOTHING)
    return out, f"{title} ({usually} unless said)" if usually else title


def accuracy(found: Sequence[Group], title: str, said: str, points: Callable[[FinishedRun], Points]) -> Figure:
    """Return the one figure of all jobs: curves of their accuracy, a panel a setting, or their last values as dots."""
    drawn = _curves(found, title, f"{said} (%)", points)
    if drawn is not None:
        return drawn
    table: dict[str, dict[str, list[float]]] = {}
    for group in found:
        table.setdefault(replace(group, setting=()).label, {})[_setting(group)] = _last(group, points)
    best = sorted(table, key=lambda method: -max(over_seeds(values)[0] for values in table[method].values()))
    return plots.dots({method: table[method] for method in best}, title, f"{said}, last round (%)")


def _curves(
    found: Sequence[Group], title: str, ylabel: str, points: Callable[[FinishedRun], Points], unit: float = 100
) -> Figure | None:
    """Return curves with a panel a setting; None where they are too many.

    What not every method has is no panel but said with the curve, and so is all that varies where there is one method.
    """
    one = len({group.method for group in found}) == 1 and len(found) <= LINES
    apart = {key for group in found for key, value in group.setting if one or value == NOTHING}
    panels: dict[str, dict[str, list[Points]]] = {}
    for group in found:
        panel = _setting(replace(group, setting=tuple(pair for pair in group.setting if pair[0] not in apart)))
        label = replace(group, setting=tuple(pair for pair in group.setting if pair[0] in apart)).label
        panels.setdefault(panel, {})[label] = [[(t, unit * value) for t, value in points(run)] for run in group.runs]
    if len(panels) > PANELS or max(map(len, panels.values())) > LINES:
        return None
    return plots.draw("curves", panels, title, "round", ylabel)


def _setting(group: Group) -> str:
    return ", ".join(f"{short(key)}={value}" for key, value in group.setting)


def _last(group: Group, points: Callable[[FinishedRun], Points]) -> list[float]:
    return [100 * points(run)[-1][1] for run in group.runs if points(run)]


def _nodes(found: Sequence[Group], title: str) -> dict[str, Figure]:
    """Return what stands in ``nodes.csv``: accuracies at the end as CDF and bars, weights over rounds."""
    out: dict[str, Figure] = {}
    at_end = (
        {group.label: [run.last_of_nodes("accuracy") for run in group.runs] for group in found} if len(found) <= LINES else {}
    )
    at_end = {label: values for label, values in at_end.items() if any(values)}
    if at_end:
        pooled = {label: [100 * x for seed in values for x in seed.values()] for label, values in at_end.items()}
        out["nodes_cdf"] = plots.draw(
            "cdf", {"": pooled}, title, "accuracy of a node on its own test part (%)", "share of nodes"
        )
    if 1 <= len(at_end) <= NODE_ROWS:
        first = {label: {node: 100 * x for node, x in values[0].items()} for label, values in at_end.items()}
        seeds = "" if all(len(values) == 1 for values in at_end.values()) else ", first seed"
        out["nodes"] = plots.node_bars(first, f"{title}{seeds}", "accuracy of a node (%)")
    for name, metric, ylabel in (
        ("weights", "weight", "mean weight of nodes that have one"),
        ("weights_all", "weight_all", "mean weight of all nodes"),
    ):
        traces = {group.label: [run.mean_over_nodes(metric) for run in group.runs] for group in found[: LINES + 1]}
        traces = {label: seeds for label, seeds in traces.items() if all(seeds)}
        if traces and len(found) <= LINES:
            out[name] = plots.draw("curves", {"": traces}, title, "round", ylabel)
    return out


def _swept(found: Sequence[Group], title: str, said: str, points: Callable[[FinishedRun], Points]) -> dict[str, Figure]:
    """Return lines over one swept number, a heat map of two; nothing for other sweeps, or where a run did not end."""
    if any(group.until is not None for group in found):
        return {}
    keys = [key for key, _ in found[0].setting]
    if not 1 <= len(keys) <= 2 or not all(_is_number(value) for group in found for _, value in group.setting):
        return {}
    ylabel = f"{said}, last round (%)"
    if len(keys) == 1:
        series: dict[str, dict[float, list[float]]] = {}
        for group in found:
            series.setdefault(group.method, {})[float(group.setting[0][1])] = _last(group, points)
        return {"swept": plots.draw("lines", {"": series}, title, short(keys[0]), ylabel)} if len(series) <= LINES else {}
    panels: dict[str, dict[tuple[str, str], float]] = {}
    for group in sorted(found, key=lambda group: [float(value) for _, value in group.setting]):
        place = (group.setting[0][1], group.setting[1][1])
        panels.setdefault(group.method, {})[place] = over_seeds(_last(group, points))[0]
    if len(panels) > PANELS:
        return {}
    return {"heat_map": plots.draw("heatmap", panels, f"{title}: {ylabel}", short(keys[1]), short(keys[0]))}


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def of_papers(runs: Sequence[FinishedRun]) -> dict[str, Figure]:
    """Return {name: figure} for every figure of a paper that finished runs name, apart by ``scale`` and what was ``changed``.

    Kinds that show something else than runs' numbers (t-SNE, a partition, availability) are not drawn here.
    """
    found: dict[tuple, list[FinishedRun]] = {}
    for run in runs:
        published = run.config.get("published") or {}
        if run.finished and published.get("figure") and published.get("plot"):
            changed = tuple(sorted(map(str, run.config.get("changed") or ())))
            key = (str(published["paper"]), str(published["figure"]), str(run.config.get("scale") or ""), changed)
            found.setdefault(key, []).append(run)
    out = {}
    for (paper, number, scale, changed), members in found.items():
        aside = [*([f"scale={scale}"] if scale else []), *changed]
        title = f"{load(paper)['paper'].iloc[0]}, Figure {number}" + (f" ({', '.join(aside)})" if aside else "")
        drawn = planned(members, members[0].config["published"]["plot"], title)
        if drawn is not None:
            out["-".join([paper, f"figure{number}", *aside]).replace("/", "_")] = drawn
    return out


def planned(runs: Sequence[FinishedRun], plot: Mapping[str, Any], title: str) -> Figure | None:
    """Return the figure that a ``plot`` describes: its kind, metric, and the dotted keys of x, line and panel.

    The metric is each run's own, since methods without personal models are scored otherwise. None for a kind that is not drawn
    here, and where no run has the metric.
    """
    kind = str(plot["kind"])
    shape = OVER_TIME.get(kind, kind)
    if shape not in plots.KINDS:
        return None
    panels: dict[str, dict[Any, Any]] = {}
    for run in runs:
        keys = {**flat(run.config), **{f"published.{k}": v for k, v in run.config["published"].items()}}
        panel = ", ".join(shown(keys.get(key)) for key in plot.get("panel") or ())
        line = shown(keys.get(plot["line"])) if plot.get("line") else composition(run.config["strategy"])
        x = shown(keys.get(str(plot.get("x"))))
        _add(panels.setdefault(panel, {}), shape, line, x, run, bool(plot.get("line")))
    panels = {panel: data for panel, data in panels.items() if data}
    said, x_said = _said(str(plot["metric"])), short(str(plot.get("x") or ""))
    if not panels:
        return None
    if str(plot["metric"]).startswith(NODES):
        return plots.node_bars(next(iter(panels.values())), title, said)
    if shape == "heatmap":
        means = {panel: {place: over_seeds(values)[0] for place, values in data.items()} for panel, data in panels.items()}
        return plots.draw("heatmap", means, f"{title}: {said}", x_said, short(str(plot["line"])))
    methods = {run.method for run in runs}
    method = methods.pop() if len(methods) == 1 else None
    xlabel, ylabel = (said, "share of nodes") if shape == "cdf" else (x_said, said)
    return plots.draw(shape, panels, title, xlabel, ylabel, method)


def _add(place: dict[Any, Any], shape: str, line: str, x: str, run: FinishedRun, named: bool) -> None:
    """Add one run to a panel's data, as its kind takes them (``plots.KINDS``); nothing where it has no such number."""
    metric = str(run.config["published"]["plot"]["metric"])
    if metric.startswith(NODES):
        values = run.last_of_nodes(metric.removeprefix(NODES))
        if values:
            place.setdefault(line, {node: _unit(metric) * value for node, value in values.items()})
        return
    if shape in ("curves", "cdf"):
        _add_curve(place, line, run, metric, shape)
        return
    value = _number(run, metric)
    if math.isnan(value):
        return
    if shape == "lines":
        place.setdefault(line, {}).setdefault(float(x), []).append(value)
    elif shape == "heatmap":
        place.setdefault((line, x), []).append(value)
    else:
        place.setdefault(f"{line} {x}" if named else x, []).append(value)


def _add_curve(place: dict[Any, Any], line: str, run: FinishedRun, metric: str, shape: str) -> None:
    """Add one run's curve, or its nodes' values, under its line; nothing where it has none."""
    if shape == "cdf":
        values = run.last_of_nodes(metric).values()
        if values:
            place.setdefault(line, []).extend(_unit(metric) * value for value in values)
        return
    scope, split, name = _curve(metric)
    points = run.points(scope, split, name) if name else _over_nodes(run, metric) or _anywhere(run, metric)
    if points:
        place.setdefault(line, []).append([(t, _unit(metric) * value) for t, value in points])


def _curve(metric: str) -> tuple[str, str, str]:
    scope, _, rest = metric.partition("/")
    split, _, name = rest.partition("/")
    return scope, split, name


def _over_nodes(run: FinishedRun, metric: str) -> Points:
    return run.mean_over_nodes(LOGGED.get(metric, metric)) or run.mean_over_nodes(metric)


def _anywhere(run: FinishedRun, metric: str) -> Points:
    metric = LOGGED.get(metric, metric)
    return next((run.points(*key) for key in run.curves if key[2] == metric), [])


def _number(run: FinishedRun, metric: str) -> float:
    """Return a number of the summary (``summary:KEY``), or a curve's last; accuracies in percent."""
    if metric.startswith("summary:"):
        return _unit(metric) * run.number(metric.removeprefix("summary:"))
    points = run.points(*_curve(metric))
    return _unit(metric) * points[-1][1] if points else math.nan


def _unit(metric: str) -> float:
    return 100 if "accuracy" in metric else 1


def _said(metric: str) -> str:
    key = metric.removeprefix("summary:")
    return SAID.get(key, key.rpartition("/")[2].removeprefix(NODES).replace("_", " ")) + (" (%)" if "accuracy" in key else "")
