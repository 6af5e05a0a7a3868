"""Statistics of a report: the best of a setting, differences to a baseline, ranks over settings, and their LaTeX."""

import math
import re
import shutil
import subprocess

import numpy as np
import pandas as pd
import pytest
from matplotlib import image
from reported import method, write_run

from contrafed import report_command
from contrafed.report import plots, significance
from contrafed.report.groups import usable
from contrafed.report.latex import escape_tex
from contrafed.report.rank_diagram import draw_rank_diagram
from contrafed.report.runs import find
from contrafed.report.statistics import Ranking, correct_holm, rank_methods

# {method: {pattern: last accuracy of seeds 0, 1, 2}}: MOON is 1, 2, 3 points above FedAvg, in spite of the seeds' spread.
LAST = {
    "fedavg": {"full": (0.50, 0.60, 0.70), "cyclic": (0.40, 0.50, 0.60)},
    "moon": {"full": (0.51, 0.62, 0.73), "cyclic": (0.48, 0.58, 0.681)},
    "ditto": {"full": (0.20, 0.30, 0.41), "cyclic": (0.10, 0.20)},
}


@pytest.fixture
def sweep(tmp_path):
    for name, patterns in LAST.items():
        for pattern, values in patterns.items():
            for seed, value in enumerate(values):
                changes = method(name, participation={"name": pattern}, seed=seed)
                write_run(tmp_path / "sweep" / f"{name}-{pattern}-{seed}", (0.1, value), **changes)
    return tmp_path / "sweep"


def make_scores(num_methods, num_settings):
    """Return scores of many methods in many settings, two seeds each."""
    labels = {
        f"partition.alpha={number}, participation=markovian": (str(number), "markovian") for number in range(num_settings)
    }
    index = pd.MultiIndex.from_product([list(labels), [0, 1]], names=["setting", "seed"])
    values = np.random.default_rng(0).uniform(80, 100, (len(index), num_methods))
    table = pd.DataFrame(values, index, [f"method_{number} strategy.contrast_weight=0.1" for number in range(num_methods)])
    return significance.Scores("test accuracy", ("partition.alpha", "participation"), labels, table, None)


def test_differences_are_of_equal_seeds(sweep):
    scores = significance.collect_scores(find([sweep]))
    table = significance.build_differences(scores, "title")
    rows = table.numbers.set_index(["method", "participation"])
    moon = rows.loc[("moon", "full")]
    assert (moon["n"], moon["difference"]) == (3, pytest.approx(2))
    # By hand: mean 2, std 1, so 2 -+ 4.302653 / sqrt(3); p = 0.0741799. Ten seeds find one point if the std is one point.
    assert (moon["low"], moon["high"]) == (pytest.approx(2 - 2.484138, abs=1e-5), pytest.approx(2 + 2.484138, abs=1e-5))
    assert (moon["p"], moon["seeds_for_one_point"]) == (pytest.approx(0.0741799, abs=1e-6), 10)
    assert rows.loc[("ditto", "cyclic")]["n"] == 2
    assert rows["p_holm"].tolist() == pytest.approx(correct_holm(rows["p"].tolist()), nan_ok=True)
    assert math.isnan(rows.loc[("ditto", "cyclic")]["p"])  # two equal differences
    assert not (rows["p_holm"] < rows["p"]).any()
    (cells,) = [row for row in table.rows if row[:2] == ("moon", "full")]
    assert cells[2:5] == ("3", "+2.00", "-0.48 to +4.48")


def test_a_tiny_p_is_not_zero():
    values = [[60.0, 50.0], [61.0, 51.0], [62.0, 52.001]]
    table = pd.DataFrame(values, pd.MultiIndex.from_product([["a"], range(3)], names=["setting", "seed"]), ["moon", "fedavg"])
    scores = significance.Scores("test accuracy", ("participation",), {"a": ("a",)}, table, "fedavg")
    differences = significance.build_differences(scores, "title")
    assert (differences.rows[0][5], "$<$ 0.001" in differences.latex) == ("< 0.001", True)


def test_the_best_and_what_cannot_be_told_from_it_are_bold(sweep):
    scores = significance.collect_scores(find([sweep]))
    assert significance.compare_to_best(scores, "participation=full") == {"moon": True, "fedavg": True, "ditto": False}
    assert significance.compare_to_best(scores, "participation=cyclic") == {"moon": True, "fedavg": False, "ditto": False}
    table = significance.build_method_table(scores, "title")
    assert table.heads == ("method", "participation=cyclic", "participation=full")
    assert table.rows[0] == ("moon", "**58.03 ± 10.05**", "**62.00 ± 11.00**")
    assert table.rows[1] == ("fedavg", "50.00 ± 10.00", "**60.00 ± 10.00**")
    assert table.markdown.splitlines()[1] == "| --- | ---: | ---: |"
    best = table.numbers.set_index(["method", "participation"])["best"]
    assert best.to_dict() == {key: key in {("moon", "full"), ("moon", "cyclic"), ("fedavg", "full")} for key in best.index}


def test_one_seed_has_a_best_alone_and_no_interval(sweep):
    scores = significance.collect_scores([run for run in find([sweep]) if run.config["seed"] == 0])
    assert significance.compare_to_best(scores, "participation=full") == {"moon": True, "fedavg": False, "ditto": False}
    table = significance.build_differences(scores, "title")
    assert table.numbers["p"].isna().all()
    assert {row[3:] for row in table.rows if row[0] == "moon"} == {("+1.00", "", "", ""), ("+8.00", "", "", "")}


def test_a_method_s_own_key_is_part_of_its_name_and_a_shared_one_is_a_setting(tmp_path):
    for temperature in (0.5, 1.0):
        strategy = {"name": "moon", "server": "fedavg", "temperature": temperature}
        write_run(tmp_path / f"moon-{temperature}", strategy=strategy)
    write_run(tmp_path / "fedavg")
    scores = significance.collect_scores(find([tmp_path]))
    assert set(scores.methods) == {"fedavg", "moon temperature=0.5", "moon temperature=1"}
    assert list(scores.settings) == [""]


def test_what_an_own_experiment_sets_for_a_method_is_the_method_s(tmp_path):
    full, half = {"name": "full", "select": None}, {"name": "full", "select": 0.5}
    write_run(tmp_path / "fedavg", experiment="own", method_keys=[], participation=full)
    recorded = {"experiment": "own", "method_keys": ["participation.select"], "participation": half}
    write_run(tmp_path / "moon", **method("moon", **recorded))
    scores = significance.collect_scores(find([tmp_path]))
    assert list(scores.settings) == [""]
    assert significance.build_differences(scores, "title") is not None
    write_run(tmp_path / "changed", **method("ditto", **recorded, changed=["participation.select=0.5"]))
    runs = [run for run in find([tmp_path]) if run.method != "moon"]
    assert list(significance.collect_scores(runs).settings) == ["participation.select=0.5", "participation.select=-"]


def test_a_run_with_recorded_method_keys_is_the_same_run(tmp_path):
    for number, more in enumerate(({}, {"method_keys": ["strategy.local.lr"]})):
        write_run(tmp_path / str(number), **more)
    assert len(usable(find([tmp_path]))[0]) == 1


def test_another_federation_is_another_setting(tmp_path):
    for name in ("fedavg", "moon"):
        for federation in (0, 1):
            write_run(tmp_path / f"{name}-{federation}", **method(name, federation_seed=federation))
    scores = significance.collect_scores(find([tmp_path]))
    assert list(scores.settings) == ["federation_seed=0", "federation_seed=1"]


def test_a_report_has_the_statistics(sweep, capsys):
    assert report_command.main([str(sweep), "--baseline", "moon"]) == 0
    assert "differences to moon" in capsys.readouterr().out
    files = {path.name for path in (sweep / "report").iterdir()}
    stems = {f"{stem}.{kind}" for stem in ("methods", "differences", "ranks") for kind in ("md", "csv", "tex")}
    assert stems | {"ranks.png", "ranks.pdf"} <= files
    assert set(pd.read_csv(sweep / "report" / "differences.csv")["method"]) == {"fedavg", "ditto"}
    assert report_command.main([str(sweep), "--baseline", "mooon"]) == 2
    assert "mooon" in capsys.readouterr().err
    assert report_command.main([str(sweep), "--list", "--baseline", "moon"]) == 2
    assert "--baseline" in capsys.readouterr().err


def test_an_unknown_baseline_is_an_error(sweep, expect_error):
    with expect_error("baseline"):
        significance.collect_scores(find([sweep]), "pmfl")


def test_a_baseline_that_shares_no_setting_is_an_error(tmp_path, expect_error):
    for seed in (0, 1, 2):
        write_run(tmp_path / "all" / f"fedavg-{seed}", seed=seed)
        for weight in (0.1, 1.0):
            strategy = {"name": "fedprox", "server": "fedavg", "local": {"lr": 0.1, "proximal_weight": weight}}
            write_run(tmp_path / "all" / f"fedprox-{weight}-{seed}", strategy=strategy, seed=seed)
    runs = find([tmp_path])
    with expect_error("baseline"):
        significance.collect_scores(runs, "fedprox")
    one = [run for run in runs if run.config["strategy"]["local"].get("proximal_weight") != 1]
    assert significance.build_differences(significance.collect_scores(one, "fedprox"), "title") is not None
    with expect_error("baseline"):
        significance.collect_scores([run for run in one if (run.method == "fedavg") == (run.config["seed"] > 0)], "fedprox")


def test_without_a_baseline_there_are_no_differences(sweep):
    runs = [run for run in find([sweep]) if run.method != "fedavg"]
    scores = significance.collect_scores(runs)
    assert scores.baseline is None
    assert significance.build_differences(scores, "title") is None
    assert significance.collect_scores([run for run in runs if run.method == "moon"]) is None


def test_ranks_are_over_the_settings_that_all_methods_have(sweep):
    scores = significance.collect_scores(find([sweep]))
    ranking = significance.rank_scores(scores)
    assert ranking.ranks == {"moon": 1, "fedavg": 2, "ditto": 3}
    assert (ranking.num_settings, ranking.friedman) == (2, pytest.approx(4))
    shutil.rmtree(sweep / "ditto-cyclic-0")
    shutil.rmtree(sweep / "ditto-cyclic-1")
    assert significance.rank_scores(significance.collect_scores(find([sweep]))) is None


@pytest.mark.figures
def test_the_rank_diagram_has_each_method_and_a_bar_a_clique(tmp_path):
    ranking = Ranking({"a": 1.2, "b": 1.9, "c": 3.1, "d": 3.8}, 10, 9.0, 0.01, 1.48)
    assert ranking.cliques == [(1.2, 1.9), (1.9, 3.1), (3.1, 3.8)]
    figure = draw_rank_diagram(ranking, "title")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"a (1.20)", "b (1.90)", "c (3.10)", "d (3.80)"} <= set(texts)
    assert sum(line.get_linewidth() == 3.5 for line in figure.axes[0].lines) == 3
    plots.save(figure, tmp_path / "ranks")
    assert image.imread(tmp_path / "ranks.png").std() > 0.05


def test_seeds_that_no_table_can_count():
    assert math.isinf(significance.compare_pairs([0, 900], [0, 0]).seeds)


def test_latex_of_many_settings_is_several_tables():
    scores = make_scores(3, 8)
    latex = significance.write_latex(scores, significance.build_method_table(scores, "a_b"))
    assert latex.count(r"\begin{table*}") == latex.count(r"\end{table*}") == 2
    assert "(part 2 of 2)" in latex
    assert r"a\_b" in latex
    rows = [line for line in latex.splitlines() if line.startswith("method")]
    assert [line.count("&") for line in rows] == [6] * 3 + [2] * 3
    assert r"\textbf{" in latex


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex with booktabs and graphicx")
@pytest.mark.parametrize("num_settings", [1, 2, 6, 14])
def test_latex_compiles_and_fits_a_two_column_page(tmp_path, num_settings):
    scores = make_scores(30, num_settings)
    tables = significance.build_tables(scores, "a sweep of 100 % & more_names ± $x$")
    for name, (_, _, latex) in tables.items():
        (tmp_path / f"{name}.tex").write_text(latex, encoding="utf-8")
    inputs = "\n".join(rf"\input{{{name}.tex}}" for name in tables)
    packages = r"\usepackage{booktabs,graphicx}"
    text = f"\\documentclass[twocolumn]{{article}}\n{packages}\n\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
    (tmp_path / "page.tex").write_text(text)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "page.log").read_text(errors="replace")
    assert not re.search(r"Overfull|too large", log), log


def test_more_methods_need_a_larger_difference():
    few = rank_methods({name: range(5) for name in "abc"})
    many = rank_methods({name: range(5) for name in "abcdefgh"})
    assert few.critical_difference < many.critical_difference


def test_a_method_without_a_seed_of_the_baseline_is_named(sweep):
    for seed in (0, 1, 2):
        shutil.rmtree(sweep / f"fedavg-cyclic-{seed}")
        if seed < 2:
            shutil.rmtree(sweep / f"ditto-full-{seed}")
    shutil.rmtree(sweep / "fedavg-full-2")
    scores = significance.collect_scores(find([sweep]))
    ditto, moon, last = significance.describe_unpaired(scores).partition("fedavg, and so")[2].partition(": ")[2].split("; ")
    assert {ditto, moon, last.strip(" .\n")} == {
        "ditto in participation=full", "ditto in participation=cyclic", "moon in participation=cyclic",
    }  # fmt: skip
    text = significance.build_tables(scores, "title")["differences"][1]
    assert significance.describe_unpaired(scores) in text


def test_a_setting_with_fewer_seeds_than_the_title_says_so_in_each_cell(sweep):
    for name in ("fedavg", "moon"):
        shutil.rmtree(sweep / f"{name}-cyclic-2")
    cells = significance.build_method_table(significance.collect_scores(find([sweep])), "title")
    assert cells.title.endswith("over 3 seeds")
    column = cells.heads.index("participation=cyclic")
    assert all(row[column].strip("*").endswith("(2 of 3)") for row in cells.rows)
    assert not any("of 3" in row[3 - column] for row in cells.rows)


@pytest.mark.parametrize("width", [3.3, 7.2])
def test_long_names_stay_within_the_rank_diagram(width):
    names = [f"PMFL, temperature = 0.{number}, contrast weight = 0.{number}" for number in range(5)]
    ranking = Ranking(dict(zip(names, (1.2, 1.9, 3.1, 3.8, 5.0), strict=True)), 10, 9.0, 0.01, 1.48)
    figure = draw_rank_diagram(ranking, "", width)
    figure.draw_without_rendering()
    for text in figure.axes[0].texts:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
    labels = [text for text in figure.axes[0].texts if "PMFL" in text.get_text()]
    boxes = [label.get_window_extent() for label in labels]
    assert len(labels) == 5
    assert not any(a.overlaps(b) for number, a in enumerate(boxes) for b in boxes[:number])


def test_without_a_common_setting_the_reason_stands_below_the_methods(tmp_path):
    for name, rounds in (("fedavg", 20), ("moon", 40)):
        write_run(tmp_path / name, num_rounds=rounds, **method(name))
    tables = significance.build_tables(significance.collect_scores(find([tmp_path])), "title")
    assert "differences" not in tables
    assert re.search("Without a seed of fedavg.*moon in num_rounds=40", tables["methods"][1])
    assert "**" not in tables["methods"][0].markdown  # nothing to compare with


def test_what_makes_methods_less_comparable_is_said(tmp_path):
    """MOON ended early, with other code, and with failures."""
    write_run(tmp_path / "fedavg", summary={"commit": "aaa", "failures": 0})
    summary = {"commit": "bbb", "failures": 7, "replies_rejected": 5}
    write_run(tmp_path / "moon", (0.1, 0.2), summary=summary, **method("moon"))
    scores = significance.collect_scores(find([tmp_path]))
    assert scores.remarks == (
        "Last rounds differ: 10 to 30.",
        "The compared runs differ in more than method and setting: commit (aaa, bbb).",
        "Runs with failures: moon (7 failed clients, 5 rejected replies).",
    )
    for name in ("methods", "differences"):
        assert all(line in significance.build_tables(scores, "title")[name][1] for line in scores.remarks)


def test_the_same_run_with_another_result_is_named(tmp_path):
    write_run(tmp_path / "a", (0.1, 0.60))
    write_run(tmp_path / "b", (0.1, 0.99))
    write_run(tmp_path / "c", (0.1, 0.99))
    assert usable(find([tmp_path]))[1] == [
        "a: c is the same configuration and seed, with another result (60.00 and 99.00)",
        "b: c is the same configuration and seed",
    ]


@pytest.mark.parametrize(("text", "tex"), [("θ≥1", r"$\theta$$\ge$1"), ("a|b", "a$|$b"), ("Δ_λ", r"$\Delta$\_$\lambda$")])
def test_signs_of_mathematics_in_latex(text, tex):
    assert escape_tex(text) == tex
