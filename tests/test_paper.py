"""Reports for a paper: display names, figures of a given width, their LaTeX table, and training settings that differ."""

import re

import pytest
from matplotlib import image
from matplotlib.text import Text
from reported import method, write_run

from contrafed import report_command
from contrafed.config.compose import compose_job
from contrafed.config.fairness import describe_differing_training, find_differing_training, warn_of_differing_training
from contrafed.core.display_names import name_key, name_method, name_setting
from contrafed.report import paper, significance
from contrafed.report.groups import group_runs
from contrafed.report.paper_figures import draw_paper_figure
from contrafed.report.runs import find
from contrafed.report.style import distinct_styles
from contrafed.runs.output.figures import accuracy_figure

SIX = ["fedavg", "fedprox", "moon", "pmfl", "fedau", "scaffold"]
RAW = re.compile(r"_|participation\.|strategy\.|\b(?:fedavg|moon|pmfl|markovian)\b")


def of_runs(folder, *many):
    for number, changes in enumerate(many):
        write_run(folder / f"{number:03}", **changes)
    return find([folder])


def choose(runs):
    found = group_runs(runs)
    return paper.choose_figures(found, runs, "about", paper.draw_sweeps(found, runs, "about"))


def test_names_are_the_papers():
    assert [name_method(name) for name in ("fedrcl+fedadam", "pmfl/no_mct", "mpfedcon/mu=0.5", "my_own")] == [
        "FedRCL+FedAdam", "PMFL without MCT", "MpFedcon (μ = 0.5)", "my own",
    ]  # fmt: skip
    assert [name_key(key) for key in ("strategy.buffer_size", "partition.path", "model.name")] == [
        "buffer size", "partition path", "model",
    ]  # fmt: skip
    assert name_setting("dataset.name", "cifar10") == "CIFAR-10"
    assert name_setting("partition.alpha", "0.1") == "Dirichlet α = 0.1"


def test_a_figure_has_its_width_readable_type_and_a_colour_and_marker_for_each_label():
    labels = [name_method(name) for name in SIX]
    curves = {label: [[(1, 10.0 * n), (2, 20.0)], [(1, 0.0), (2, 99.0 + n)]] for n, label in enumerate(labels)}
    for count, width in ((1, 3.3), (3, 3.3), (6, 7)):
        figure = draw_paper_figure("curves", {f"panel {n}": curves for n in range(count)}, "round", "accuracy (%)", width)
        figure.draw_without_rendering()
        assert figure.get_figwidth() == width
        assert {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()} == {7, 8}
        lines = [line for line in figure.axes[0].lines if not line.get_label().startswith("_")]
        assert len(lines) == len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 6
        assert figure.axes[0].get_ylim() == (0, 100)
        legend = figure.legends[0] if figure.legends else figure.axes[-1].get_legend()
        assert [text.get_text() for text in legend.get_texts()] == labels
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    assert distinct_styles(labels) == distinct_styles(labels[::-1])


def test_more_than_six_methods_and_panels_are_parted(tmp_path):
    # Not Contrafed's, which would be composed.
    many = [method(f"own{n}", participation={"name": pattern}) for n in range(7) for pattern in ("full", "markovian")]
    figures = choose(of_runs(tmp_path, *many))
    assert list(figures) == ["accuracy-1", "accuracy-2"]
    assert [len(data) for drawn in figures.values() for data in drawn.panels.values()] == [6, 6, 1, 1]
    assert list(figures["accuracy-1"].panels) == ["full", "Markovian"]
    assert [drawn.caption for drawn in figures.values()] == [
        f"Test accuracy over rounds{lone}. about." for lone in ("", ": own6")
    ]
    panels = {str(number): {"MOON": [[(1, 2.0)]]} for number in range(8)}
    parts = paper._draw_parts("accuracy", "curves", panels, "x", "y", ("", ""))
    assert [list(drawn.panels) for drawn in parts.values()] == [["0", "1", "2", "3", "4", "5"], ["6", "7"]]


def test_two_swept_numbers_are_a_heat_map_and_one_is_a_line(tmp_path):
    both = [
        method("moon", strategy={"name": "moon", "temperature": t, "weight": w, "local": {}})
        for t in (0.1, 0.5)
        for w in (1, 5, 9)
    ]
    validated = [change | {"more": [(30, "global", "validation", "accuracy", 0.95)]} for change in both]
    runs = of_runs(tmp_path / "validated", *validated)
    (drawn,) = choose(runs).values()
    scores = significance.collect_scores(runs, None, paper.validation_of(runs))
    assert scores.said == "validation accuracy"
    assert {*scores.table.to_numpy().flat} == {95}
    assert set(drawn.panels["MOON"].values()) == {95}
    assert drawn.caption.startswith("Validation accuracy")
    figures = choose(of_runs(tmp_path / "two", *both, method("fedavg")))
    drawn = figures.pop("sweep-temperature-weight")
    assert (drawn.kind, drawn.ylabel, drawn.xlabel) == ("heatmap", "temperature", "weight")
    assert figures == {}
    assert set(drawn.panels["MOON"]) == {(t, w) for t in ("0.1", "0.5") for w in ("1", "5", "9")}
    draw_paper_figure(drawn.kind, drawn.panels, drawn.xlabel, drawn.ylabel, 3.3)
    one = [method(name, partition={"name": "dirichlet", "alpha": a}) for name in ("moon", "fedavg") for a in (0.1, 1, 10)]
    figures = choose(of_runs(tmp_path / "one", *one))
    assert list(figures["sweep-alpha"].panels[""]["MOON"]) == [0.1, 1, 10]
    assert "accuracy" in figures


@pytest.mark.parametrize("key", ["federation_seed", "clip_norm"])
def test_a_swept_number_keeps_the_runs_in_which_another_key_is_null(tmp_path, key):
    runs = []
    for value in (None, 7):
        more = {"federation_seed": value} if key == "federation_seed" else {}
        strategy = {"name": "fedawe", "server": "fedawe", "local": {}} | ({} if more else {"clip_norm": value})
        runs += [{"strategy": strategy, "partition": {"name": "dirichlet", "alpha": a}} | more for a in (0.1, 1)]
    panels = choose(of_runs(tmp_path, *runs))["sweep-alpha"].panels
    lines = {(panel, label): list(line) for panel, each in panels.items() for label, line in each.items()}
    names = [("", "FedAWE"), ("federation seed = 7", "FedAWE") if more else ("", "FedAWE, clip norm = 7")]
    assert lines == {name: [0.1, 1] for name in names}


def test_a_panel_of_a_sweep_has_one_setting(tmp_path):
    def sweep_alpha(name, pattern):
        return [method(name, partition={"name": "dirichlet", "alpha": a}, participation={"name": pattern}) for a in (0.1, 1)]

    runs = of_runs(tmp_path / "apart", *sweep_alpha("fedavg", "full"), *sweep_alpha("moon", "markovian"))
    panels = choose(runs)["sweep-alpha"].panels
    assert {panel: list(lines) for panel, lines in panels.items()} == {"full": ["FedAvg"], "Markovian": ["MOON"]}
    both = [*sweep_alpha("fedavg", "full"), *sweep_alpha("fedavg", "bernoulli"), *sweep_alpha("fedprox", "bernoulli")]
    panels = choose(of_runs(tmp_path / "beside", *both))["sweep-alpha"].panels
    assert {panel: list(lines) for panel, lines in panels.items()} == {"full": ["FedAvg"], "Bernoulli": ["FedAvg", "FedProx"]}


def test_sweeps_of_keys_with_the_same_last_word_are_two_files(tmp_path):
    own = [method("apfl", strategy={"name": "apfl", "alpha": a, "local": {}}) for a in (0.2, 0.7)]
    shared = [method("moon", partition={"name": "dirichlet", "alpha": a}) for a in (0.1, 1)]
    figures = choose(of_runs(tmp_path, *own, *shared))
    assert {name for name in figures if name.startswith("sweep")} == {"sweep-strategy_alpha", "sweep-partition_alpha"}
    captions = {name: drawn.caption for name, drawn in figures.items()}
    assert captions["sweep-strategy_alpha"] == "Test accuracy after the last round, by alpha: APFL. about."
    assert captions["sweep-partition_alpha"].endswith("by Dirichlet α: MOON. about.")


def test_the_report_has_display_names_alone(tmp_path, capsys):
    lr = {"fedavg": 0.1, "moon": 0.01, "pmfl": 0.1}
    runs = [
        method(name, seed=seed, strategy__local={"lr": lr[name]}, participation={"name": there})
        for name in lr for there in ("full", "markovian") for seed in (0, 1)
    ]  # fmt: skip
    of_runs(tmp_path, *runs)
    assert report_command.main(["--paper", str(tmp_path), "--width", "7"]) == 0
    table = (tmp_path / "report" / "paper-methods.tex").read_text()
    assert r"participation & full & Markovian \\" in table
    assert "Data: digits, 4 clients, mean and standard deviation over 2 seeds." in table
    assert "Training settings differ between methods: learning rate (MOON 0.01, others 0.1)." in table
    assert not RAW.search(table.replace(r"\textbf", ""))
    document = (tmp_path / "report" / "paper.tex").read_text()
    assert r"\includegraphics[width=7in]{paper-accuracy.pdf}" in document
    assert {path.name for path in (tmp_path / "report").iterdir()} >= {"paper-accuracy.pdf", "paper-ranks.png"}
    assert "files of 12 runs are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seeds", "spread"),
    [
        ({"fedavg": (0, 1), "moon": (10, 11)}, "mean and standard deviation over 2 seeds"),
        ({"fedavg": (0, 1, 2, 3), "moon": (10, 11)}, "mean and standard deviation over 2 to 4 seeds"),
        ({"fedavg": (0,), "moon": (1,)}, "one seed each"),
        ({"fedavg": (3,), "moon": (3,)}, "seed 3"),
    ],
)
def test_a_caption_counts_the_seeds_of_a_cell(tmp_path, seeds, spread):
    runs = of_runs(tmp_path, *(method(name, seed=seed) for name, several in seeds.items() for seed in several))
    assert paper.describe_data(runs, group_runs(runs)) == f"Data: digits, 4 clients, {spread}"


def test_a_runs_figure_has_its_title(tmp_path):
    for name, title in (("plain", ""), ("titled", "MOON on $, seed 0")):
        accuracy_figure(tmp_path / f"{name}.png", {("global", "test", "accuracy"): [(1, 0.5)]}, title=title)
    plain, titled = (image.imread(tmp_path / f"{name}.png") for name in ("plain", "titled"))
    assert (titled < 0.9).sum() > (plain < 0.9).sum()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(["--width", "7"], "--width"), (["--paper", "--title", "x"], "--title"), (["--paper", "--width", "1"], "--width")],
)
def test_options_that_do_not_fit_are_refused(tmp_path, expect_error, arguments, key):
    write_run(tmp_path / "a")
    with expect_error(key):
        report_command._report(report_command.parser().parse_args([str(tmp_path), *arguments]))


def test_training_settings_that_differ_are_named():
    def differing(*lines):
        names = ("fedavg", "moon", "pmfl")
        return find_differing_training((name, compose_job([f"strategy={name}", *line])) for name in names for line in lines)

    assert differing(["experiment=digits"]) == {}
    assert differing(["experiment=digits", "strategy.local.lr=0.1"], ["experiment=digits"]) == {}  # swept for all of them
    assert warn_of_differing_training({}) == describe_differing_training({}) == ""
    found = differing([])
    assert found["strategy.local.lr"] == {"fedavg": "0.1", "moon": "0.01", "pmfl": "0.1"}
    assert warn_of_differing_training(found).startswith("strategy.local.epochs (moon 10, others none)")
    assert "local epochs (MOON 10, others none)" in describe_differing_training(found)
