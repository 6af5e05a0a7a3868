"""The papers' figures: what an experiment's ``plot`` draws from runs, and comparisons of two runs."""

import math

import pytest
import torch
from helpers import slow
from omegaconf import OmegaConf
from reported import method, write_run
from safetensors.torch import save_file

from contrafed.config.compose import compose_job, expand_jobs, read_grid
from contrafed.core import registry
from contrafed.report import figure_data, figures, pictures, plots
from contrafed.report.runs import find

FEATURES = ("within", "between", "effective_rank", "vci")


def kind_of(experiment):
    """Return the kind of an experiment's figure, or None if no report draws runs' numbers as the file describes it."""
    path = registry.CONF / "experiment" / f"{experiment}.yaml"
    plot = (OmegaConf.load(path).get("published") or {}).get("plot") or {}
    return plot.get("kind", "curves") if plot and plot.get("kind", "curves") in plots.KINDS else None


DRAWN = {name: kind_of(name) for name in registry.choices("experiment") if kind_of(name)}
ONE_OF_EACH_KIND = {kind: name for name, kind in DRAWN.items()}.values()


def sample_jobs(experiment):
    """Return jobs of a grid with every method, and the first and last value of every other axis."""
    asked = []
    for name, axis in read_grid(experiment).items():
        values = list(map(str, axis))
        asked.append(f"{name}=" + ",".join(values if name == "strategy" else dict.fromkeys([values[0], values[-1]])))
    seen, jobs = set(), []
    for job in expand_jobs([f"experiment={experiment}", *asked]):
        if set(job.overrides) - seen:
            seen |= set(job.overrides)
            jobs.append(job.overrides)
    return jobs


def leave(folder, config):
    """Write the files of a run that figures need."""
    from contrafed.core.client_run import choose
    from contrafed.training.workspace import client_class_of

    client, log = choose("strategy", config["strategy"]), config["log"]
    personal = config["evaluate_after"] == "local_training" or client_class_of(client).is_personal(client.config)
    scopes = [("personal", "test")] if personal else [("global", "test")]
    scopes += [("global", "clients")] if config["eval_clients"] and not personal else []
    scopes += [("global", "train")] if config["eval_train"] and not personal else []
    rows = [(t, *scope, name, 0.5) for t in (1, 2) for scope in scopes for name in ("accuracy", "loss")]
    fit = [f"features_{name}" for name in FEATURES] if "features" in log else []
    fit += ["deviation"] if "deviation" in log else []
    rows += [(t, "global", "fit", name, 0.5) for t in (1, 2) for name in fit]
    by_client = ["accuracy"] if personal or config["eval_clients"] else []
    by_client += ["train_accuracy", "train_loss"] if "clients_train" in log else []
    by_client += ["probability"] if "probability" in log else []
    by_client += ["weight_all"] if "weights" in log else []
    clients = [(t, client, name, 0.25 + client / 2) for t in (1, 2) for client in (0, 1) for name in by_client]
    timed = {"local_seconds_median": 0.5, "aggregate_seconds_median": 0.1} if config["eval_every"] > 4 else {}
    write_run(folder, (), clients=clients, more=rows, summary=timed, **config)
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    if config["save_personal"]:
        (folder / "personal").mkdir()
        save_file({"model/a": torch.ones(2)}, folder / "personal" / "0.safetensors")


@pytest.mark.parametrize("experiment", [name if name in ONE_OF_EACH_KIND else slow(name) for name in DRAWN])
def test_an_experiments_own_plot_shows_its_runs(tmp_path, experiment, monkeypatch):
    monkeypatch.setattr(pictures, "draw", lambda *_: None)
    for number, job in enumerate(sample_jobs(experiment)):
        leave(tmp_path / f"{number}", OmegaConf.to_container(compose_job(job), resolve=True))
    runs = find([tmp_path])
    for run in runs:
        plot = figure_data.plot_of(run)
        place = figure_data.place_of(run, plot)
        assert "-" not in (*place.panel.split(", "), place.line), place
        assert plot["x"] in ("round", "client", None) or place.x != "-", place
    metrics, shape = [metric for metric in figure_data.metrics_of(runs[0]) if metric not in pictures.KINDS], plot["kind"]
    for which, metric in enumerate(metrics):
        for run in runs:
            figure_data.add(into := {}, shape, figure_data.metrics_of(run)[which], run, runs, figure_data.place_of(run, plot))
            alone = metric in figure_data.BASELINE_OF_METRIC and figure_data.beside(run, runs, metric) is None
            assert bool(into) != alone, (run.config["strategy"]["name"], metric)
    assert len(figures.of_papers(runs)) == len(metrics)


def runs_of(tmp_path, plot, *many):
    """Return the runs of a figure that ``plot`` describes, from the changes of each."""
    published = {
        "paper": "pmfl", "figure": "9", "table": None, "plot": {"x": "round", "line": "strategy.name", "panel": [], **plot},
    }  # fmt: skip
    for number, changes in enumerate(many):
        write_run(tmp_path / f"{number}", **{"published": published, **changes})
    return find([tmp_path])


def test_a_client_that_diverged_counts_as_above_every_loss(tmp_path):
    clients = [(30, client, "train_loss", value) for client, value in enumerate((2.0, 1.0, math.nan, 1.0))]
    plot = {"kind": "cdf", "metric": "train_loss", "x": None}
    (figure,) = figures.of_papers(runs_of(tmp_path, plot, {"clients": clients})).values()
    (line,) = figure.axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 1, 2], [0, 0.5, 0.75])


def test_a_gain_is_over_who_trains_alone_with_the_same_seed(tmp_path):
    plot = {"kind": "bars", "metric": "clients:accuracy_gain", "x": "client"}
    rows = {name: [(30, client, "accuracy", value) for client, value in enumerate(values)] for name, values in {
        "other": (0.1, 0.1, 0.1), "local": (0.5, 0.75, 0.5), "moon": (0.75, 0.5, 1.0), "fedavg": (0.5, 0.25, 0.75),
    }.items()}  # fmt: skip
    seeds = {name: {"seed": 1 if name == "other" else 0} for name in rows}
    many = [{"clients": rows[name], **method(name.replace("other", "local"), **seeds[name])} for name in rows]
    (figure,) = figures.of_papers(runs_of(tmp_path, plot, *many)).values()
    said = [axes.get_title(loc="left") for axes in figure.axes]
    assert said == [
        "MOON (67% of clients gain), mean over clients 16.67",
        "FedAvg (33% of clients gain), mean over clients -8.333",
    ]
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[50, 25, -25], [25, 0, -50]]
    assert figure.get_supylabel() == "gain in accuracy over training alone (%)"
    assert figures.of_papers(find([tmp_path / "2"])) == {}


def test_bars_stand_in_the_order_of_their_numbers(tmp_path):
    plot = {"kind": "bars", "metric": "global/test/accuracy", "x": "model.epochs", "line": None}
    many = [{"model": {"name": "cnn", "epochs": epochs}} for epochs in (1, 10, 20, 5)]
    (figure,) = figures.of_papers(runs_of(tmp_path, plot, *many)).values()
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["1", "5", "10", "20"]


def test_clients_are_those_of_one_seed_which_is_said(tmp_path):
    plot = {"kind": "bars", "metric": "clients:accuracy", "x": "client"}
    rows = [[(30, client, "accuracy", value) for client in range(2)] for value in (0.25, 0.75)]
    many = [{"clients": clients, "seed": seed} for seed, clients in zip((3, 1), rows, strict=True)]
    (figure,) = figures.of_papers(runs_of(tmp_path, plot, *many)).values()
    assert "seed 1" in figure.get_suptitle()
    assert [bar.get_height() for axes in figure.axes for bar in axes.patches] == [75, 75]


def test_weights_are_shown_of_all_clients_and_of_those_nearest_to_a_probability(tmp_path):
    """p = 0.5 is nearest to 0.402 of the clients with a weight. It tends to (1 - 0.5^2) / 0.5 = 1.5 with a cutoff of 2."""
    rows = [(t, client, "weight_all", t * (client + 1)) for t in (1, 2) for client in range(2)]
    rows += [(2, client, "probability", p) for client, p in enumerate((0.5, 0.02, 0.4))]
    plot = {"kind": "curves", "metric": "weight_all", "line": None, "probabilities": [0.402, 0.02]}
    strategy = {"name": "pmfl", "server": "pmfl", "cutoff": 2}
    (figure,) = figures.of_papers(runs_of(tmp_path, plot, {"clients": rows, "strategy": strategy})).values()
    shown = {line.get_label(): line.get_ydata().tolist() for line in figure.axes[0].lines}
    assert shown == {
        "mean of all clients": [1.5, 3],
        "client nearest p = 0.402": [1, 2],
        "its expected weight, p = 0.402": [1.5, 1.5],
        "client nearest p = 0.02": [2, 4],
        "its expected weight, p = 0.02": pytest.approx([1.98, 1.98]),
    }


def test_several_metrics_are_a_figure_each_and_accuracies_alone_are_smoothed(tmp_path):
    """Also with a run of an earlier version, which names one metric."""
    plot = {"kind": "curves", "metric": ["global/test/accuracy", "global/test/loss"], "x": "round", "window": 50}
    more = [(t, "global", "test", name, t % 2) for t in range(1, 101) for name in ("accuracy", "loss")]
    published = {"paper": "pmfl", "figure": "9", "table": None, "plot": {**plot, "metric": "global/test/accuracy"}}
    old = {"accuracies": (), "more": more, **method("moon", published=published)}
    found = figures.of_papers(runs_of(tmp_path, plot, old, {"accuracies": (), "more": more}))
    assert list(found) == ["pmfl-figure9-accuracy", "pmfl-figure9-loss"]
    accuracy, loss = ({line.get_label(): line.get_ydata()[-2:].tolist() for line in f.axes[0].lines} for f in found.values())
    assert accuracy == {"moon": [50, 50], "fedavg": [50, 50]}
    assert loss == {"fedavg": [1, 0]}
    assert [figure.get_supxlabel() for figure in found.values()] == ["round (means of 50 points)", "round"]


def test_the_distance_of_clients_that_train_alone_is_drawn_where_their_models_are(tmp_path):
    plot = {"kind": "lines", "metric": "distance", "x": "model.epochs"}
    many = [method(name, model={"name": "cnn", "epochs": e}) for e in (1, 5) for name in ("local", "fedavg")]
    runs = runs_of(tmp_path, plot, *many)
    assert figures.of_papers(runs) == {}
    for number, value in enumerate((1.0, 0.0, 5.0, 3.0)):
        name, path = ("a", "model.safetensors") if number % 2 else ("model/a", "personal/0.safetensors")
        (tmp_path / f"{number}" / "personal").mkdir()
        save_file({name: torch.tensor([value])}, tmp_path / f"{number}" / path)
    (figure,) = figures.of_papers(runs).values()
    (line,) = figure.axes[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 5], [1, 4])
