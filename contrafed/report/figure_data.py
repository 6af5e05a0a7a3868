"""Collect the data of a paper's figure from its runs: numbers, curves and clients' values, also compared with another run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from contrafed.config.compose import composition
from contrafed.core.errors import UserError
from contrafed.report.gains import gaining, gains
from contrafed.report.groups import format_value, number_of
from contrafed.report.runs import FinishedRun, Points, flat
from contrafed.runs.output import series

# Prefix of metrics by client.
CLIENTS = "clients:"
# Accuracies of personal models, and of those that are fine-tuned before it.
PERSONAL, UNTUNED = ("personal", "test", "accuracy"), ("personal", "test", "untuned/accuracy")
# Metrics that compare a run with another one, and the method of that one: MpFedcon, Figures 9 and 3.
GAIN, DISTANCE = "clients:accuracy_gain", "distance"
BASELINE_OF_METRIC = {GAIN: "local", DISTANCE: "fedavg"}

METRIC_LABELS = {
    "accuracy_top5_mean": "test accuracy, mean of the best five",
    "train_accuracy_top5_mean": "training accuracy, mean of the best five",
    "accuracy_final": "test accuracy, last round",
    "accuracy_ema": "test accuracy, moving average",
    "personal_accuracy_best": "clients' accuracy, best round",
    "personal_accuracy_mean": "clients' accuracy, last round",
    "personal_accuracy_last10_mean": "clients' accuracy, mean of the last ten",
    "clients_accuracy_best": "clients' accuracy, best round",
    "clients_accuracy_last10_mean": "clients' accuracy, mean of the last ten",
    "local_seconds_median": "seconds of local training in a round, median",
    "aggregate_seconds_median": "seconds of aggregation on the server in a round, median",
    "global/test/accuracy": "test accuracy",
    "global/train/accuracy": "training accuracy",
    "personal/test/accuracy": "clients' accuracy",
    "global/clients/accuracy": "clients' accuracy",
    "personal/test/loss": "clients' loss",
    "global/clients/loss": "clients' loss",
    "global/fit/features_within": "trace of the covariance within classes",
    "global/fit/features_between": "trace of the covariance between classes",
    "global/fit/features_effective_rank": "effective rank of representations",
    "global/fit/features_vci": "variability collapse index of representations",
    "global/fit/deviation": "deviation of the updates, summed over participants",
    "weight_all": "weight",
    "train_accuracy": "training accuracy of a client",
    "train_loss": "training loss of a client",
    "clients:probability": "p_k",
    GAIN: "gain in accuracy over training alone",
    DISTANCE: "mean squared difference from FedAvg's parameters",
}


class Place(NamedTuple):
    """A run's place in a figure."""

    panel: str
    line: str
    x: str
    named: bool  # whether the plot names its lines


def plot_of(run: FinishedRun) -> Mapping[str, Any]:
    """Return the figure that a run's configuration describes: ``published.plot``."""
    plot: Mapping[str, Any] = run.published_values["plot"]
    return plot


def metrics_of(run: FinishedRun) -> list[str]:
    """Return the metrics of a run's figures, one per figure."""
    metric = plot_of(run)["metric"]
    return [str(one) for one in metric] if isinstance(metric, list | tuple) else [str(metric)]


def word_of(metric: str) -> str:
    """Return the last word of a metric: ``features_vci`` of ``global/fit/features_vci``."""
    return metric.rpartition("/")[2].rpartition(":")[2]


def unit_of(metric: str) -> float:
    """Return a metric's factor: 100 for accuracies, in percent, else 1."""
    return 100 if "accuracy" in metric else 1


def said_of(metric: str) -> str:
    """Return a metric as the label of an axis."""
    key = metric.removeprefix("summary:")
    return METRIC_LABELS.get(key, word_of(key).replace("_", " ")) + (" (%)" if "accuracy" in key else "")


def place_of(run: FinishedRun, plot: Mapping[str, Any]) -> Place:
    """Return a run's place in a figure, by the dotted keys of ``plot`` for panel, line and x. A missing key gives -."""
    keys = {**flat(run.config), **{f"published.{key}": value for key, value in run.published_values.items()}}
    panel = ", ".join(format_value(keys.get(key)) for key in plot.get("panel") or ())
    line = format_value(keys.get(plot["line"])) if plot.get("line") else composition(run.config["strategy"])
    return Place(panel, line, format_value(keys.get(str(plot.get("x")))), bool(plot.get("line")))


def beside(run: FinishedRun, runs: Sequence[FinishedRun], metric: str) -> FinishedRun | None:
    """Return the run that a metric compares this one with: same panel, same x, same seed. None if there is none."""
    plot = plot_of(run)

    def where(one: FinishedRun) -> tuple[Any, ...]:
        place = place_of(one, plot)
        return place.panel, place.x, one.config.get("seed")

    others = (other for other in runs if other is not run and other.config["strategy"]["name"] == BASELINE_OF_METRIC[metric])
    return next((other for other in others if where(other) == where(run)), None)


def add(into: dict[Any, Any], shape: str, metric: str, run: FinishedRun, runs: Sequence[FinishedRun], place: Place) -> None:
    """Add one run to a panel's data in the form of its kind (``plots.KINDS``). Nothing is added without such a number."""
    if metric.startswith(CLIENTS):
        label, values = _of_clients(run, runs, metric, place.line)
        if values:
            into.setdefault(label, {client: unit_of(metric) * value for client, value in values.items()})
        return
    if shape == "cdf":
        if each := list(run.last_of_clients(metric).values()):
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


def _of_clients(run: FinishedRun, runs: Sequence[FinishedRun], metric: str, line: str) -> tuple[str, dict[int, float]]:
    """Return a label and each client's last value. A gain's label has the share of clients that gain."""
    if metric != GAIN:
        return line, run.last_of_clients(metric.removeprefix(CLIENTS))
    alone = beside(run, runs, metric)
    found = {} if alone is None else gains(run.last_of_clients("accuracy"), alone.last_of_clients("accuracy"))
    return (f"{line} ({gaining(found):.0%} of clients gain)", found) if found else (line, {})


def _curves(run: FinishedRun, metric: str, line: str) -> list[tuple[str, Points]]:
    """Return a run's curves with their labels, none if it has none.

    With ``probabilities`` in the plot a metric by client is shown as its mean, and for the clients with the nearest p_k. Each
    of these is shown with the weight that it tends to (PMFL, Figure 6).
    """
    scope, split, name = _key(metric)
    points = run.points(scope, split, name) if name else run.mean_over_clients(metric)
    wanted = plot_of(run).get("probabilities") or ()
    out = [("mean of all clients", points)] if wanted else split_tuned(run, points, line)
    for probability in wanted:
        weights, limit = _nearest(run, metric, float(probability))
        out += [(f"client nearest p = {probability}", weights), (f"its expected weight, p = {probability}", limit)]
    return [(label, curve) for label, curve in out if curve]


def split_tuned(run: FinishedRun, points: Points, label: str) -> list[tuple[str, Points]]:
    """Return (label, curve). A last point that is of fine-tuned models, unlike those before it, is apart as ``LABEL tuned``."""
    untuned = run.points(*UNTUNED) if points == run.points(*PERSONAL) else []
    curve, tuned = series.split_tuned(points, untuned)
    return [(label, list(curve)), *([(f"{label} tuned", list(tuned))] if tuned else [])]


def expected_weight(probability: float, cutoff: int) -> float:
    """Compute (1 - (1 - p)^C) / p, the mean length of an interval that ends with a participation or after C rounds.

    PMFL's and FedAU's weights tend to it, if a client participates in each round with ``probability`` p in (0, 1].
    """
    return (1 - (1 - probability) ** cutoff) / probability


def _nearest(run: FinishedRun, metric: str, probability: float) -> tuple[Points, Points]:
    """Return the curve of the client with the nearest p_k, and its limit. Both are empty if p_k or weights are not logged."""
    p = {client: value for client, value in run.last_of_clients("probability").items() if value > 0}
    table = run.of_clients(metric)
    known = sorted(p.keys() & set(table["client"].tolist()))
    if not known:
        return [], []
    client = min(known, key=lambda client: abs(p[client] - probability))
    own = table[table["client"] == client]
    limit = expected_weight(p[client], int(run.config["strategy"]["cutoff"]))
    points = list(zip(own["round"].tolist(), own["value"].tolist(), strict=True))
    # ``results`` keeps only the last round.
    return (points, [(t, limit) for t, _ in points]) if len(points) > 1 else ([], [])


def _key(metric: str) -> tuple[str, str, str]:
    scope, _, rest = metric.partition("/")
    split, _, name = rest.partition("/")
    return scope, split, name


def _number(run: FinishedRun, runs: Sequence[FinishedRun], metric: str) -> float:
    """Return a number of the summary (``summary:KEY``), a distance, or a curve's last value. Accuracies are in percent."""
    if metric == DISTANCE:
        return _distance(run, beside(run, runs, metric))
    return unit_of(metric) * run.number(metric.removeprefix("summary:"))


def _distance(solo: FinishedRun, shared: FinishedRun | None) -> float:
    """Return the distance of models trained alone from another run's model, NaN if models are missing."""
    # Slow to import, and rarely needed.
    from contrafed.report.model_distance import distance_of_runs

    if solo.config["strategy"]["name"] != "local" or shared is None or solo.folder is None or shared.folder is None:
        return math.nan
    try:
        return distance_of_runs(solo.folder, shared.folder)
    except UserError:
        return math.nan
