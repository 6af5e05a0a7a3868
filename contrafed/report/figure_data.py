"""What a figure of a paper takes from its runs: numbers, curves and values of nodes, also of one run beside another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contrafed.core.errors import UserError
from contrafed.report.gains import gaining, gains
from contrafed.report.groups import number_of, shown
from contrafed.report.runs import FinishedRun, Points, composition, flat

# Metrics of nodes, one by one.
NODES = "nodes:"
# What is of a run beside another one, and beside whose: MpFedcon, Figures 9 and 3.
GAIN, DISTANCE = "nodes:accuracy_gain", "distance"
BESIDE = {GAIN: "local", DISTANCE: "fedavg"}

SAID = {
    "accuracy_top5_mean": "test accuracy, mean of the best five",
    "train_accuracy_top5_mean": "training accuracy, mean of the best five",
    "accuracy_final": "test accuracy, last round",
    "accuracy_ema": "test accuracy, moving average",
    "personal_accuracy_best": "nodes' accuracy, best round",
    "personal_accuracy_mean": "nodes' accuracy, last round",
    "personal_accuracy_last10_mean": "nodes' accuracy, mean of the last ten",
    "nodes_accuracy_best": "nodes' accuracy, best round",
    "nodes_accuracy_last10_mean": "nodes' accuracy, mean of the last ten",
    "local_seconds_median": "seconds of local work in a round, median",
    "aggregate_seconds_median": "seconds of the server's rule in a round, median",
    "global/test/accuracy": "test accuracy",
    "global/train/accuracy": "training accuracy",
    "personal/test/accuracy": "nodes' accuracy",
    "global/nodes/accuracy": "nodes' accuracy",
    "personal/test/loss": "nodes' loss",
    "global/nodes/loss": "nodes' loss",
    "global/fit/features_within": "trace of the covariance within classes",
    "global/fit/features_between": "trace of the covariance between classes",
    "global/fit/features_effective_rank": "effective rank of representations",
    "global/fit/features_vci": "variability collapse index of representations",
    "global/fit/deviation": "deviation of the updates, summed over participants",
    "weight_all": "weight",
    "train_accuracy": "training accuracy of a node",
    "train_loss": "training loss of a node",
    "nodes:probability": "p_k",
    GAIN: "gain in accuracy over training alone",
    DISTANCE: "mean squared difference from FedAvg's parameters",
}


class Place(NamedTuple):
    """Where a run stands in a figure."""

    panel: str
    line: str
    x: str
    named: bool  # whether the plot says what its lines are


def plot_of(run: FinishedRun) -> Mapping[str, Any]:
    """Return the figure that a run's configuration describes: ``published.plot``."""
    plot: Mapping[str, Any] = run.published["plot"]
    return plot


def metrics_of(run: FinishedRun) -> list[str]:
    """Return what a run's figures show, one each."""
    metric = plot_of(run)["metric"]
    return [str(one) for one in metric] if isinstance(metric, list | tuple) else [str(metric)]


def word_of(metric: str) -> str:
    """Return the last word of a metric: ``features_vci`` of ``global/fit/features_vci``."""
    return metric.rpartition("/")[2].rpartition(":")[2]


def unit_of(metric: str) -> float:
    """Return what a metric is multiplied by: 100 for accuracies, in percent, else 1."""
    return 100 if "accuracy" in metric else 1


def said_of(metric: str) -> str:
    """Return a metric as an axis has it."""
    key = metric.removeprefix("summary:")
    return SAID.get(key, word_of(key).replace("_", " ")) + (" (%)" if "accuracy" in key else "")


def place_of(run: FinishedRun, plot: Mapping[str, Any]) -> Place:
    """Return a run's place in a figure, by the dotted keys that ``plot`` has for panel, line and x; - for a key it lacks."""
    keys = {**flat(run.config), **{f"published.{key}": value for key, value in run.published.items()}}
    panel = ", ".join(shown(keys.get(key)) for key in plot.get("panel") or ())
    line = shown(keys.get(plot["line"])) if plot.get("line") else composition(run.config["strategy"])
    return Place(panel, line, shown(keys.get(str(plot.get("x")))), bool(plot.get("line")))


def beside(run: FinishedRun, runs: Sequence[FinishedRun], metric: str) -> FinishedRun | None:
    """Return the run that a metric compares this one with: in its panel, at its x, with its seed; None where there is none."""
    plot = plot_of(run)

    def where(one: FinishedRun) -> tuple[Any, ...]:
        place = place_of(one, plot)
        return place.panel, place.x, one.config.get("seed")

    others = (other for other in runs if other is not run and other.config["strategy"]["name"] == BESIDE[metric])
    return next((other for other in others if where(other) == where(run)), None)


def add(into: dict[Any, Any], shape: str, metric: str, run: FinishedRun, runs: Sequence[FinishedRun], place: Place) -> None:
    """Add one run to a panel's data, as its kind takes them (``plots.KINDS``); nothing where it has no such number."""
    if metric.startswith(NODES):
        label, values = _of_nodes(run, runs, metric, place.line)
        if values:
            into.setdefault(label, {node: unit_of(metric) * value for node, value in values.items()})
        return
    if shape == "cdf":
        if each := list(run.last_of_nodes(metric).values()):
            into.setdefault(place.line, []).extend(unit_of(metric) * value for value in each)
        return
    if shape == "curves":
        for label, points in _curves(run, metric, place.line):
            into.setdefault(label, []).append([(t, unit_of(metric) * value) for t, value in points])
        return
    value = _number(run, runs, metric)
    if math.isnan(value):
        return
    if shape == "lines":
        if math.isfinite(x := number_of(place.x)):
            into.setdefault(place.line, {}).setdefault(x, []).append(value)
    elif shape == "heatmap":
        into.setdefault((place.line, place.x), []).append(value)
    else:
        into.setdefault(f"{place.line} {place.x}" if place.named else place.x, []).append(value)


def _of_nodes(run: FinishedRun, runs: Sequence[FinishedRun], metric: str, line: str) -> tuple[str, dict[int, float]]:
    """Return a label and each node's last value; of a gain the label has the share of nodes that have one above 0."""
    if metric != GAIN:
        return line, run.last_of_nodes(metric.removeprefix(NODES))
    alone = beside(run, runs, metric)
    found = {} if alone is None else gains(run.last_of_nodes("accuracy"), alone.last_of_nodes("accuracy"))
    return (f"{line} ({gaining(found):.0%} of nodes gain)", found) if found else (line, {})


def _curves(run: FinishedRun, metric: str, line: str) -> list[tuple[str, Points]]:
    """Return a run's curves with their labels, none where it has none.

    With ``probabilities`` in the plot a metric of nodes is shown as its mean and for the nodes whose p_k is nearest to them,
    beside the weight that theirs tends to (PMFL, Figure 6).
    """
    scope, split, name = _key(metric)
    points = run.points(scope, split, name) if name else run.mean_over_nodes(metric)
    wanted = plot_of(run).get("probabilities") or ()
    out = [("mean of all nodes" if wanted else line, points)]
    for probability in wanted:
        weights, limit = _nearest(run, metric, float(probability))
        out += [(f"node nearest p = {probability}", weights), (f"its expected weight, p = {probability}", limit)]
    return [(label, curve) for label, curve in out if curve]


def expected_weight(probability: float, cutoff: int) -> float:
    """Return (1 - (1 - p)^C) / p: the mean length of an interval that ends with a participation or after C rounds.

    PMFL's and FedAU's weights tend to it for a node that takes part with ``probability`` p in (0, 1] of each round's draws.
    """
    return (1 - (1 - probability) ** cutoff) / probability


def _nearest(run: FinishedRun, metric: str, probability: float) -> tuple[Points, Points]:
    """Return the curve of the node whose p_k is nearest, and what it tends to; empty where p_k or weights are not logged."""
    p = {node: value for node, value in run.last_of_nodes("probability").items() if value > 0}
    table = run.of_nodes(metric)
    known = sorted(p.keys() & set(table["node"].tolist()))
    if not known:
        return [], []
    node = min(known, key=lambda node: abs(p[node] - probability))
    own = table[table["node"] == node]
    limit = expected_weight(p[node], int(run.config["strategy"]["cutoff"]))
    points = list(zip(own["round"].tolist(), own["value"].tolist(), strict=True))
    # ``results`` keeps the last round alone.
    return (points, [(t, limit) for t, _ in points]) if len(points) > 1 else ([], [])


def _key(metric: str) -> tuple[str, str, str]:
    scope, _, rest = metric.partition("/")
    split, _, name = rest.partition("/")
    return scope, split, name


def _number(run: FinishedRun, runs: Sequence[FinishedRun], metric: str) -> float:
    """Return a number of the summary (``summary:KEY``), a distance, or a curve's last; accuracies in percent."""
    if metric == DISTANCE:
        return _distance(run, beside(run, runs, metric))
    return unit_of(metric) * run.number(metric.removeprefix("summary:"))


def _distance(solo: FinishedRun, shared: FinishedRun | None) -> float:
    """Return how far the models of nodes that train alone are from another run's; NaN where models are not at hand."""
    # Slow to import, and rarely wanted.
    from contrafed.report.model_distance import distance_of_runs

    if solo.config["strategy"]["name"] != "local" or shared is None or solo.folder is None or shared.folder is None:
        return math.nan
    try:
        return distance_of_runs(solo.folder, shared.folder)
    except UserError:
        return math.nan
