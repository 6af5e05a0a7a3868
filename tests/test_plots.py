"""Figures: one style per method, the figure for given runs, and the content of each."""

import math

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgb
from reported import method, write_run

from contrafed.core import registry
from contrafed.core.display_names import name_label
from contrafed.report import figures, plots
from contrafed.report.groups import group_runs
from contrafed.report.runs import find
from contrafed.report.style import method_of, style_of, styles

METHODS = list(registry.choices("strategy"))


def get_panel(figure, panel=0):
    return figure.axes[panel]


def test_a_methods_look_comes_from_its_name_and_methods_of_one_figure_differ():
    assert style_of("somebody_elses") == style_of("somebody_elses")
    assert len({style_of(name) for name in METHODS}) > len(METHODS) / 2
    look = styles(METHODS)
    assert len({(style.colour, str(style.line)) for style in look.values()}) == len(METHODS)
    assert len({(style.colour, style.marker) for style in look.values()}) == len(METHODS)
    eight = METHODS[:8]
    assert len({style.colour for style in styles(eight).values()}) == 8
    assert styles(eight) == styles(eight[::-1])
    assert styles(["pmfl"])["pmfl"] == style_of("pmfl")


def test_colours_are_told_apart_on_white_and_from_each_other():
    # Relative luminance against white at least 1.9 (WCAG's contrast), and no two colours alike.
    colours = sorted({style_of(name).colour for name in METHODS})
    assert len(colours) == 8
    for colour in colours:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        assert 1.05 / (np.dot([0.2126, 0.7152, 0.0722], linear) + 0.05) > 1.9, colour


def test_labels_of_one_method_share_its_colour():
    look = styles(["pmfl", "pmfl/no_mct", "pmfl beta=0.1", "fedau", "fedrcl+fedadam"])
    assert len({look[label].colour for label in ("pmfl", "pmfl/no_mct", "pmfl beta=0.1")}) == 1
    assert len({look[label].marker for label in ("pmfl", "pmfl/no_mct", "pmfl beta=0.1")}) == 3
    assert look["fedau"] == style_of("fedau")  # the first by the alphabet
    assert len({look[label].colour for label in ("pmfl", "fedau", "fedrcl+fedadam")}) == 3
    assert len(set(styles([f"moon lr={lr}" for lr in range(16)]).values())) == 16
    assert method_of("mpfedcon/mu=0.5 classes=2") == "mpfedcon"


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("fedavg schedule=buffered num_rounds=120", "FedAvg, buffered, rounds = 120"),
        ("fedavg participation.deadline=q0.8 to round 80", "FedAvg, deadline = 0.8 of the cohort to round 80"),
        ("fedrcl+fedadam local.lr=0.1 temperature=2", "FedRCL+FedAdam, learning rate = 0.1, temperature = 2"),
        ("fedcrl (20% of clients gain)", "FedCRL (20% of clients gain)"),
        ("mu=0.1", "mu=0.1"),
    ],
)
def test_labels_are_shown_in_words(label, shown):
    assert name_label(label) == shown


def test_curves_show_mean_and_band():
    series = {"pmfl": [[(10, 60.0), (20, 70.0)], [(10, 64.0), (20, 70.0)]], "fedau": [[(10, 50.0), (20, 55.0)]]}
    figure = plots.draw("curves", {"full": series, "cyclic": {"pmfl": [[(10, 1.0)]]}}, "title", "round", "accuracy (%)")
    line = get_panel(figure).lines[0]
    assert line.get_ydata().tolist() == [62, 70]
    assert line.get_color() == style_of("pmfl").colour
    assert len(get_panel(figure).collections) == 1  # one band: a single seed has none
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["PMFL", "FedAU"]
    assert get_panel(figure, 1).get_title() == "cyclic"


@pytest.mark.figures
def test_a_name_with_dollars_is_drawn_as_it_is(tmp_path):
    name = r"cost $\frac{1}$"
    for figure in (
        plots.draw("curves", {name: {"pmfl": [[(10, 60.0), (20, 70.0)]]}}, name, "round", "accuracy (%)"),
        plots.client_bars({"pmfl": {0: 1.0}}, name, "accuracy (%)"),
    ):
        assert all(path.stat().st_size for path in plots.save(figure, tmp_path / "figure"))


def test_long_curves_are_smoothed_and_say_so():
    """All curves of a figure are smoothed equally, also a shorter one."""
    long, short = ([[(t, float(t % 2)) for t in range(1, end)]] for end in (201, 41))
    for window, end in ((20, 0.5), (3, 1 / 3)):
        figure = plots.draw("curves", {"": {"pmfl": long, "fedau": short}}, "", "round", "accuracy (%)", None, window)
        assert [line.get_ydata()[-1] for line in get_panel(figure).lines] == pytest.approx([end, end])
        assert figure.get_supxlabel() == f"round (means of {window} points)"
    figure = plots.draw("curves", {"": {"pmfl": long, "fedau": short}}, "", "round", "deviation")
    assert [line.get_ydata()[-1] for line in get_panel(figure).lines] == [0, 0]
    assert figure.get_supxlabel() == "round"


def test_other_kinds_show_what_they_are_given():
    step = get_panel(plots.draw("cdf", {"": {"pmfl": [1, 1, 3]}}, "", "x", "share")).lines[0]
    assert step.get_xydata().tolist() == [[1, 0], [1, pytest.approx(2 / 3)], [3, 1]]
    swept = get_panel(plots.draw("lines", {"": {"pmfl": {0.01: [50.0, 52.0], 1.0: [60.0], 5.0: [70.0]}}}, "", "beta", "y"))
    assert swept.lines[0].get_ydata().tolist() == [51, 60, 70]
    assert swept.get_xscale() == "log"
    cells = {("1", "0.1"): 50.0, ("1", "0.2"): 70.0, ("2", "0.1"): 60.0}
    map_ = get_panel(plots.draw("heatmap", {"": cells}, "", "x", "y"))
    assert sorted(text.get_text() for text in map_.texts) == ["50.0", "60.0", "70.0"]  # the missing cell is empty
    assert math.isnan(map_.images[0].get_array().filled(np.nan)[1, 1])
    stopped = get_panel(plots.draw("heatmap", {"": {("0.1", "1"): 1.0, ("0.1", "10"): 2.0, ("0.2", "5"): 3.0}}, "", "x", "y"))
    assert [tick.get_text() for tick in stopped.get_xticklabels()] == ["1", "5", "10"]
    two = plots.draw("heatmap", {"a": cells, "b": {("2", "0.2"): 90.0}}, "", "x", "y")
    assert [axes.images[0].get_clim() for axes in two.axes] == [(50, 90), (50, 90)]
    assert [tick.get_text() for tick in get_panel(two, 1).get_yticklabels()] == ["1", "2"]
    box = get_panel(plots.draw("box", {"": {"pmfl": [1.0, 2.0, 3.0], "fedau": [2.0, 2.0, 5.0]}}, "", "", "y"))
    assert [tick.get_text() for tick in box.get_xticklabels()] == ["PMFL", "FedAU"]
    bars = get_panel(plots.draw("bars", {"": {"pmfl": [1.0, 3.0], "fedau": [4.0]}}, "", "", "y"))
    assert [bar.get_height() for bar in bars.patches] == [2, 4]
    clients = plots.client_bars({"pmfl": {0: 50.0, 1: 90.0}, "fedau": {0: 10.0, 1: 20.0}}, "", "y")
    assert [bar.get_height() for bar in get_panel(clients, 1).patches] == [20, 10]  # in the order of pmfl's
    label = "moon partition.alpha=0.1 participation=markovian local.lr=0.05 local.epochs=5 model.projection=[256, 256]"
    (axes,) = (figure := plots.client_bars({f"{label} num_clients=9": {0: 50.0}}, "", "y")).axes
    figure.draw_without_rendering()
    assert axes._left_title.get_text().endswith("clients 50")
    assert axes._left_title.get_window_extent().x1 <= figure.bbox.x1


def test_a_value_far_below_all_others_keeps_its_number():
    table = {f"m{i}": {"": [90.0 + i]} for i in range(8)}
    figure = plots.dots({**table, "fedawe": {"a": [9.7], "b": [10.3], "": [97.0]}}, "", "accuracy")
    assert [text.get_text() for text in get_panel(figure).texts] == ["■ 9.7  ▲ 10.3"]
    assert get_panel(figure).get_xlim()[0] > 60


def test_dots_of_many_settings_are_told_apart():
    figure = plots.dots({"moon": {f"alpha={n}": [float(n)] for n in range(15)}}, "", "accuracy")
    lines = [line for line in get_panel(figure).lines if line.get_label() == "_nolegend_"]
    looks = [(line.get_marker(), line.get_markerfacecolor()) for line in lines]
    handles = [(line.get_marker(), line.get_markerfacecolor()) for line in figure.legends[0].legend_handles]
    assert len(set(looks)) == len(set(handles)) == 15


@pytest.mark.figures
def test_png_and_pdf(tmp_path):
    figure = plots.draw("curves", {"": {"mpfedcon": [[(1, 10.0), (2, 90.0)]]}}, "one", "round", "accuracy (%)")
    png, pdf = plots.save(figure, tmp_path / "figure.v1")
    assert (png.name, pdf.name) == ("figure.v1.png", "figure.v1.pdf")
    pixels = image.imread(png)[..., :3]
    colour = np.array(to_rgb(style_of("mpfedcon").colour))
    assert (np.abs(pixels - colour).max(-1) < 0.02).sum() > 200


def runs_of(tmp_path, *many):
    for number, changes in enumerate(many):
        write_run(tmp_path / f"{number:03}", **changes)
    return find([tmp_path])


def test_which_figures_suit_which_runs(tmp_path):
    lr = [method("moon", strategy={"name": "moon", "local": {"lr": lr}}) for lr in (0.1, 0.2)]
    assert set(figures.of_runs(runs_of(tmp_path / "lr", *lr), "")) == {"accuracy", "swept"}
    grid = [{**change, "partition": {"name": "iid", "alpha": alpha}} for change in lr for alpha in (1, 2)]
    assert set(figures.of_runs(runs_of(tmp_path / "grid", *grid), "")) == {"accuracy", "heat_map"}
    seeds = [method(name, seed=seed) for name in ("moon", "fedavg") for seed in range(4)]
    assert set(figures.of_runs(runs_of(tmp_path / "seeds", *seeds), "")) == {"accuracy", "box"}
    rows = [(30, client, "accuracy", client / 4) for client in range(4)] + [(10, 0, "weight", 1.0), (10, 1, "weight", 3.0)]
    clients = figures.of_runs(runs_of(tmp_path / "clients", {"clients": rows}), "")
    assert set(clients) == {"accuracy", "clients", "clients_cdf", "weights"}
    assert get_panel(clients["weights"]).lines[0].get_ydata().tolist() == [2]
    one = runs_of(tmp_path / "one", {"clients": rows, **method("fedau")}, method("fedavg"))  # only FedAU's clients have weights
    alone = figures.of_runs(one, "")
    assert all("FedAU" in alone[name].get_suptitle() for name in ("weights", "clients_cdf"))
    many = figures.of_runs(runs_of(tmp_path / "many", *(method(name) for name in METHODS[:17])), "")
    assert len(get_panel(many["accuracy"]).get_yticklabels()) == 17  # dots, a row a method


def test_readings_of_one_method_share_a_panel(tmp_path):
    tried = [{"name": "moon", "mu": mu, "tau": tau} for mu, tau in ((1, 1), (1, 2), (1, 3), (2, 1))]
    axes = get_panel(
        figures.of_runs(runs_of(tmp_path, *(method("moon", strategy=strategy) for strategy in tried)), "")["accuracy"]
    )
    assert len({line.get_label() for line in axes.lines}) == len({line.get_color() for line in axes.lines}) == 4


def test_variants_of_a_method_are_methods_of_their_own(tmp_path):
    """PMFL's Table V: a panel for each beta, and a line for each variant in both."""
    there = [{"name": "bernoulli", "beta": beta} for beta in (0.1, 0.5)]
    names = ("pmfl", "pmfl/no_mct")
    runs = [method("pmfl", published={"method": name}, participation=pattern) for name in names for pattern in there]
    figure = figures.of_runs(runs_of(tmp_path, *runs), "")["accuracy"]
    assert [axes.get_title() for axes in figure.axes] == ["participation β = 0.1", "participation β = 0.5"]


@pytest.mark.parametrize(
    ("plot", "panel", "shown"),
    [
        ({"kind": "curves", "metric": "global/test/accuracy", "x": "round", "line": "strategy.name"}, "full", [50, 80, 70]),
        ({"kind": "box", "metric": "summary:accuracy_final", "x": "strategy.name", "line": None}, "full", None),
        ({"kind": "bars", "metric": "summary:accuracy_best", "x": "published.setting", "line": None}, "full", None),
        ({"kind": "lines", "metric": "summary:accuracy_best", "x": "partition.alpha", "line": "strategy.name"}, "full", [80]),
        ({"kind": "heatmap", "metric": "summary:accuracy_best", "x": "partition.alpha", "line": "strategy.name"}, "full", None),
        ({"kind": "curves", "metric": "weight_all", "x": "round", "line": None}, "full", [2]),
        ({"kind": "cdf", "metric": "train_accuracy", "x": None, "line": "strategy.name"}, "full", [0, 0.5, 1]),
        ({"kind": "tsne", "metric": "features", "x": None, "line": None}, None, None),
        ({"kind": "curves", "metric": "global/fit/deviation", "x": "round", "line": None}, None, None),
    ],
)
def test_a_papers_figure_is_drawn_as_it_says(tmp_path, plot, panel, shown):
    rows = [(30, 0, "train_accuracy", 0.5), (30, 1, "train_accuracy", 0.7), (10, 0, "weight_all", 1), (10, 1, "weight_all", 3)]
    published = {
        "paper": "pmfl", "table": None, "figure": 8, "dataset": "SVHN", "method": "pmfl", "setting": "H=3", "cells": [],
        "plot": {**plot, "panel": ["participation.name"]},
    }  # fmt: skip
    told = {"scale": "small", "changed": ["num_rounds=3"], "settings": "code"}
    write_run(tmp_path / "a", clients=rows, published=published, **told)
    found = figures.of_papers(find([tmp_path]))
    if panel is None:
        assert found == {}
        return
    assert list(found) == ["pmfl-figure8-scale=small"]
    (figure,) = found.values()
    assert figure.get_suptitle().startswith("PMFL, Figure 8 (scale=small, num_rounds=3)")
    assert get_panel(figure).get_title() == panel
    assert figure.legends == []
    if shown is not None:
        assert get_panel(figure).lines[0].get_ydata().tolist() == pytest.approx(shown)
    write_run(tmp_path / "b", clients=rows, published=published, **told | {"changed": ["num_rounds=4"]})
    assert set(figures.of_papers(find([tmp_path]))) == {f"pmfl-figure8-scale=small-num_rounds={n}" for n in (3, 4)}
    long = [f"strategy.local.of_a_long_name_{i}=1" for i in range(10)]
    write_run(tmp_path / "c", clients=rows, published=published, scale="small", changed=long)
    assert max(map(len, figures.of_papers(find([tmp_path])))) < 200


def test_bars_of_clients_and_a_metric_of_each_method(tmp_path):
    plot = {"kind": "bars", "metric": "clients:accuracy", "x": "client", "line": "strategy.name", "panel": []}
    published = {"paper": "fedcosr", "figure": "12", "table": None, "method": "fedcrl", "plot": plot}
    for name, low in (("fedcrl", 0.5), ("fedavg", 0.25)):
        rows = [(30, client, "accuracy", low + client / 4) for client in range(2)]
        write_run(tmp_path / "bars" / name, clients=rows, **method(name, published={**published, "method": name}))
    (figure,) = figures.of_papers(find([tmp_path / "bars"])).values()
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[50, 25], [75, 50]]
    apart = {**published, "plot": {**plot, "panel": ["partition.alpha"]}}
    for alpha in (1, 2):
        rows = [(30, client, "accuracy", alpha / 4) for client in range(2)]
        settings = {"published": {**apart, "method": "fedavg"}, "partition": {"name": "iid", "alpha": alpha}}
        write_run(tmp_path / "panels" / str(alpha), clients=rows, **method("fedavg", **settings))
    (figure,) = figures.of_papers(find([tmp_path / "panels"])).values()
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "FedAvg, 1, mean over clients 25",
        "FedAvg, 2, mean over clients 50",
    ]
    for name, scope in (("fedcrl", ("personal", "test")), ("fedavg", ("global", "clients"))):
        own = {"kind": "curves", "metric": "/".join([*scope, "accuracy"]), "line": "strategy.name", "panel": []}
        write_run(tmp_path / "curves" / name, scope=scope, **method(name, published={**published, "method": name, "plot": own}))
    (figure,) = figures.of_papers(find([tmp_path / "curves"])).values()
    assert {line.get_label() for line in get_panel(figure).lines} == {"fedcrl", "fedavg"}


def test_values_of_a_key_have_their_methods_colour(tmp_path):
    plot = {"kind": "bars", "metric": "summary:accuracy_best", "x": "published.setting", "line": None, "panel": []}
    for setting in ("H=0", "H=3"):
        published = {"paper": "pmfl", "figure": 8, "method": "pmfl", "setting": setting, "plot": plot}
        write_run(tmp_path / setting, published=published)
    (figure,) = figures.of_papers(find([tmp_path])).values()
    assert {bar.get_facecolor()[:3] for bar in get_panel(figure).patches} == {to_rgb(style_of("pmfl").colour)}


def test_a_last_evaluation_of_fine_tuned_models_is_apart(tmp_path):
    own = ("personal", "test")
    write_run(
        tmp_path / "a", (0.1, 0.3, 0.4, 0.9), scope=own, more=[(30, *own, "untuned/accuracy", 0.5)], **method("fedavg_ft")
    )
    write_run(tmp_path / "b", (0.1, 0.6, 0.6, 0.6), scope=own, **method("fedper"))
    figure = figures.of_runs(find([tmp_path]), "title")["accuracy"]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in get_panel(figure).lines}
    assert drawn["fedavg_ft"][-2:] == [[20, 40], [30, 50]]
    assert drawn["fedavg_ft tuned"] == [[30, 90]]
    assert drawn["fedper"][-1] == [30, pytest.approx(60)]
    assert "fedper tuned" not in drawn


def test_a_methods_null_is_named_where_the_title_has_the_others_value(tmp_path):
    for name, select in (("fedavg", 0.1), ("moon", 0.1), ("local", None)):
        write_run(tmp_path / name, **method(name, participation={"name": "full", "select": select}))
    found, title = figures.quiet(group_runs(find([tmp_path])), "title")
    assert "selected clients = 0.1" in title
    assert sorted(name_label(group.label) for group in found) == ["FedAvg", "Local+FedAvg, selected clients = all", "MOON"]


def test_ticks_of_close_values_have_a_logarithmic_axis():
    def scale(*values):
        return get_panel(plots.draw("lines", {"": {"pmfl": {x: [50.0] for x in values}}}, "", "x", "y")).get_xscale()

    assert scale(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0) == "log"
    assert scale(1.0, 2.0, 3.0) == scale(0.0, 0.01, 1.0) == "linear"


def test_numbers_of_equal_cells_are_legible():
    map_ = get_panel(plots.draw("heatmap", {"": {("1", "1"): 80.0, ("1", "2"): 80.0}}, "", "x", "y"))
    assert {text.get_color() for text in map_.texts} == {"white"}
