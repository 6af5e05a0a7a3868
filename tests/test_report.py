"""The command line of reports, their tables, and the runs stored in the repository."""

import errno
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib import image
from messages import ROOT
from reported import method, write_run

from contrafed import report_command
from contrafed.report import figures, pages, results, results_pages, tables
from contrafed.report.groups import find_varied_keys, group_runs, usable
from contrafed.report.pages import leave
from contrafed.report.runs import find, read


@pytest.fixture
def sweep(tmp_path):
    """Two methods, two patterns, and two seeds of the first method."""
    for seed, top in ((0, 0.8), (1, 0.6)):
        for pattern in ("full", "cyclic"):
            name = {"participation": {"name": pattern}, "seed": seed}
            write_run(tmp_path / "sweep" / f"moon-{pattern}-{seed}", (0.1, 0.5, top), **method("moon", **name))
    for pattern in ("full", "cyclic"):
        write_run(tmp_path / "sweep" / f"fedavg-{pattern}", (0.1, 0.4, 0.55), participation={"name": pattern})
    return tmp_path / "sweep"


def answer(capsys, *arguments):
    status = report_command.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_what_was_varied_and_groups_over_seeds(sweep):
    runs = find([sweep])
    assert find_varied_keys(runs) == ["participation.name"]
    found = {group.label: group for group in group_runs(runs)}
    assert set(found) == {f"{name} participation={p}" for name in ("moon", "fedavg") for p in ("full", "cyclic")}
    assert found["moon participation=full"].numbers("accuracy_final") == [0.8, 0.6]


def test_a_key_of_another_choice_is_not_varied(tmp_path):
    write_run(tmp_path / "a", participation={"name": "markovian", "beta": 0.1})
    write_run(tmp_path / "b", participation={"name": "full"}, **method("moon"))
    write_run(tmp_path / "c", participation={"name": "markovian", "beta": 0.5})
    assert find_varied_keys(find([tmp_path])) == ["participation.name", "participation.beta"]
    assert find_varied_keys(find([tmp_path / "a", tmp_path / "b"])) == ["participation.name"]


def test_a_key_that_only_one_method_has_otherwise_is_said_with_it(sweep):
    """Only Moon has another rate, so that rate makes no panel. Participation still does."""
    runs = find([sweep])
    for pattern in ("full", "cyclic"):
        strategy = {"name": "moon", "server": "fedavg", "local": {"lr": 0.3}}
        write_run(sweep / f"fast-{pattern}", (0.1, 0.9), strategy=strategy, participation={"name": pattern})
    found, title = figures.quiet(group_runs(find([sweep])), "sweep")
    assert title == "sweep (learning rate = 0.1, unless the legend says otherwise)"
    assert {group.label for group in found} == {
        *(f"{name} participation={p}" for name in ("moon", "fedavg") for p in ("full", "cyclic")),
        *(f"moon local.lr=0.3 participation={p}" for p in ("full", "cyclic")),
    }
    assert figures.quiet(group_runs(runs), "sweep") == (group_runs(runs), "sweep")


def test_methods_are_named_with_another_server_rule(tmp_path):
    rule = {"strategy": {"name": "fedrcl", "server": "fedadam"}}
    write_run(tmp_path / "a", **rule)
    write_run(tmp_path / "b", **method("fedcl"))  # its YAML inherits FedRCL's, whose strategy is FedAvg's
    write_run(tmp_path / "c", strategy={"name": "fedavgm", "server": "fedavgm"})
    assert [run.method for run in find([tmp_path])] == ["fedrcl+fedadam", "fedcl", "fedavgm"]


def test_table_of_runs_by_hand(sweep):
    # FedAvg's last is 55 %, which moon reaches in round 20 (80 and 60) and fedavg in round 20.
    runs = find([sweep])
    table = tables.runs_table(runs, "title")
    heads = table.heads
    assert heads[:4] == ("method", "participation", "seeds", "rounds")
    row = dict(zip(heads, table.rows[0], strict=True))
    assert (row["method"], row["participation"], row["seeds"], row["rounds"]) == ("moon", "cyclic", "2", "20 of 40")
    assert row["test accuracy, last"] == "70.00 ± 14.14"
    assert row["test accuracy, mean of the best five"] == "60.00 ± 7.07"  # (50 + 80) / 2 and (50 + 60) / 2
    assert row["MiB a client and round"] == "3.000 ± 0.000"
    # 2 MiB up and 4 down in rounds 10 and 20.
    assert heads[-3:] == ("FedAvg's last test accuracy", "rounds to FedAvg's last", "MiB to FedAvg's last")
    assert [row[head] for head in heads[-3:]] == ["55.00", "20", "12"]
    assert [cells[0] for cells in table.rows] == ["moon", "fedavg", "moon", "fedavg"]
    best = tables.runs_table(runs, "title", 0.7)
    assert dict(zip(best.heads, best.rows[0], strict=True))["rounds to 70 % test accuracy"] == "20 (1 of 2)"
    assert best.rows[1][-2:] == ("-", "-")


def test_markdown_and_latex(sweep):
    table = tables.Table(
        "50 % & more", ("a_b", "x"), (("p|q", "1.50 ± 0.20"), ("r", "")), pd.DataFrame({"a_b": ["p|q"], "x": [1.5]})
    )
    assert table.markdown == "| a_b | x |\n| --- | ---: |\n| p\\|q | 1.50 ± 0.20 |\n| r |  |\n"
    assert r"\caption{50 \% \& more}" in table.latex
    assert r"p$|$q & 1.50 $\pm$ 0.20 \\" in table.latex
    assert r"a\_b & x \\" in table.latex
    assert table.csv == "a_b,x\np|q,1.5\n"


@pytest.mark.figures
def test_tables_and_figures_of_a_folder(sweep, capsys):
    status, out, _ = answer(capsys, sweep, "--title", "a sweep")
    assert status == 0
    assert "| moon | cyclic | 2 |" in out
    assert {path.stem for path in (sweep / "report").iterdir()} == {"runs", "methods", "differences", "accuracy"}
    assert image.imread(sweep / "report" / "accuracy.png").std() > 0.05
    assert (sweep / "report" / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    again = (sweep / "report" / "accuracy.pdf").read_bytes()
    answer(capsys, sweep, "--title", "a sweep")
    assert (sweep / "report" / "accuracy.pdf").read_bytes() == again


def test_runs_are_listed(sweep, capsys):
    write_run(sweep / "killed", summary=False)
    status, out, _ = answer(capsys, "--list", sweep)
    assert status == 0
    (line,) = [line for line in out.splitlines() if line.startswith("killed")]
    assert line.split() == ["killed", "fedavg", "digits", "dirichlet", "full", "0", "30", "of", "40", "unfinished", "70.00"]
    (head,) = [line for line in out.splitlines() if line.startswith("run ")]
    assert head.index("test accuracy") < line.index("70.00") < head.index("clients' accuracy")
    assert len(out.splitlines()) == 8


def test_two_runs_side_by_side(sweep, capsys):
    status, out, _ = answer(capsys, "--compare", sweep / "moon-full-0", sweep / "fedavg-full")
    assert status == 0
    differences, _, numbers = out.partition("Summaries")
    assert [line.split() for line in differences.splitlines()[3:] if line] == [["strategy.name", "moon", "fedavg"]]
    (line,) = [line.split() for line in numbers.splitlines() if line.startswith("accuracy_final")]
    assert line == ["accuracy_final", "0.8", "0.55", "-0.25"]
    shutil.copytree(sweep, sweep.parent / "again")
    _, out, _ = answer(capsys, "--compare", sweep / "moon-full-0", sweep.parent / "again" / "moon-full-0")
    assert all(str(folder / "moon-full-0") in out for folder in (sweep, sweep.parent / "again"))


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--liist",
        "nowhere",
        "empty",
        "sweep --target 0",
        "--compare sweep sweep/fedavg-full",
        "--compare sweep",
        "--results",
        "--results --list",
        "sweep --out file",
        "killed",
        "torn",
        "headless",
        "foreign",
        "partial",
        "summary",
        "--results --target 50",
        "sweep --list --title a",
        "sweep --name a",
        "--compare killed killed sweep",
    ],
)
def test_mistakes_are_one_line(sweep, monkeypatch, capsys, expect_error, arguments):
    monkeypatch.chdir(sweep.parent)
    Path("empty").mkdir()
    Path("file").write_text("")
    write_run(Path("killed"), summary=False)
    for name in ("torn", "headless", "foreign", "summary"):
        write_run(Path(name))
    with Path("torn/metrics.csv").open("a") as file:
        file.write("40,global,te\n")
    Path("headless/metrics.csv").write_text("round,scope,split,metric\n1,a,b,c\n")
    Path("foreign/config.yaml").write_text("a: 1\n")
    write_run(Path("partial"), participation=None)
    Path("summary/summary.json").write_text("{")
    status, out, err = answer(capsys, *arguments.split())
    assert status == 2
    (line,) = [line for line in err.splitlines() if not line.startswith("left out")]
    assert line.startswith("error: ")
    expect_error.check(line)


def test_what_is_left_out_is_named(tmp_path):
    write_run(tmp_path / "first")
    write_run(tmp_path / "second")
    write_run(tmp_path / "killed", summary=False, seed=1)
    write_run(tmp_path / "scored", evaluate_only="runs/a", seed=2)
    write_run(tmp_path / "blind", (), seed=3)
    kept, aside = usable(find([tmp_path]))
    assert [run.name for run in kept] == ["second"]
    assert aside == [
        "blind: nothing was evaluated",
        "first: second is the same configuration and seed",
        "killed: unfinished in round 30 of 40",
        "scored: it scored what another run had saved",
    ]
    kept, _ = usable(find([tmp_path]), unfinished=True)
    assert [run.name for run in kept] == ["killed", "second"]
    assert kept[0].number("accuracy_best") == 0.8


def test_a_run_that_did_not_end_says_how_far_it_came(tmp_path):
    """The longest run of one configuration and seed is used. A shorter run of another seed does not enter its mean."""
    write_run(tmp_path / "long", (0.1, 0.5, 0.8), summary=False)
    write_run(tmp_path / "short", (0.1, 0.4), summary=False)
    write_run(tmp_path / "other", (0.1, 0.3), summary=False, seed=1)
    write_run(tmp_path / "moon", **method("moon"))
    kept, aside = usable(find([tmp_path]), unfinished=True)
    assert aside == ["short: long is the same configuration and seed"]
    assert {group.label for group in group_runs(kept)} == {"fedavg to round 20", "fedavg to round 10", "moon"}
    assert not any("FedAvg" in head for head in tables.runs_table(kept, "t").heads)
    write_run(tmp_path / "whole", (0.1, 0.2, 0.2, 0.2))
    kept, _ = usable(find([tmp_path]), unfinished=True)
    assert {group.label for group in group_runs(kept)} == {"fedavg", "fedavg to round 10", "moon"}
    assert {row[-3] for row in tables.runs_table(kept, "t").rows} == {"20.00"}


def test_a_line_that_was_cut_off_is_no_line(tmp_path):
    write_run(tmp_path / "a", (0.1, 0.5), clients=[(10, 0, "accuracy", 0.5)])
    for name, line in {"metrics": "20,global,test,accuracy,0.", "clients": "20,0,acc"}.items():
        with (tmp_path / "a" / f"{name}.csv").open("a") as file:
            file.write(line)
    (run,) = find([tmp_path])
    assert run.points("global", "test", "accuracy") == [(10, 0.5)]
    assert run.last_of_clients("accuracy") == {0: 0.5}


def test_one_run_stands_in_every_table_that_names_it_and_counts_once(tmp_path):
    for table in ("1", "2"):
        write_run(tmp_path / table, published={"table": table})
    kept, aside = usable(find([tmp_path]))
    assert (len(kept), aside) == (2, [])
    assert [len(group.runs) for group in group_runs(kept)] == [1]


def test_a_run_that_has_not_begun_is_no_run(tmp_path):
    write_run(tmp_path / "done")
    write_run(tmp_path / "claimed")
    (tmp_path / "claimed" / "config.yaml").write_text("")
    assert [run.name for run in find([tmp_path])] == ["done"]


def test_results_alone_give_the_same_tables(sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    status, out, _ = answer(capsys, "--results", "sweep")
    assert status == 0
    assert "wrote 6 runs of sweep to results/sweep.csv" in out
    first = {path: path.read_bytes() for path in [*Path("results").rglob("*.csv"), *Path("docs").rglob("*.*")]}
    assert {str(path) for path in first} >= {"results/sweep.csv", "results/curves/sweep.csv", "docs/RESULTS.md"}
    stored, runs = results.load(Path("results/sweep.csv")), find([sweep])
    assert tables.runs_table(stored, "t", 0.55).rows == tables.runs_table(runs, "t", 0.55).rows
    assert stored[0].config["strategy"] == runs[0].config["strategy"]
    # Without the folders, and again: the same bytes.
    status, _, _ = answer(capsys, "--results")
    assert status == 0
    assert {path: path.read_bytes() for path in first} == first


def test_results_are_added_to(sweep, monkeypatch, capsys):
    monkeypatch.chdir(sweep.parent)
    answer(capsys, "--results", "sweep")
    write_run(Path("more/moon-full-2"), (0.1, 0.5, 0.7), **method("moon", seed=2))
    write_run(Path("more/fedavg-full-1"), (0.1, 0.4, 0.5), **method("fedavg", seed=1))
    status, _, _ = answer(capsys, "--results", "more", "--name", "sweep")
    assert status == 0
    names = [run.name for run in results.load(Path("results/sweep.csv"))]
    assert len(names) == 8
    assert "moon-full-2" in names
    Path("results/sweep.md").write_text("# What moon does\n\nSix rounds.\n\n## Remarks\n\nIt wins.\n")
    Path("results/README.md").write_text("# Results\n\nOne [disk](../docs/results/sweep.md) failed.\n")
    Path("results/alone.md").write_text("# Words alone\n\nNo run.\n")
    answer(capsys, "--results")
    index, page = Path("docs/RESULTS.md").read_text(), Path("docs/results/sweep.md").read_text()
    assert index.startswith(results_pages.HEAD + "\nOne [disk](results/sweep.md) failed.\n\n## Pages\n")
    assert "| [What moon does](results/sweep.md) | 8 |\n| [Words alone](results/alone.md) | |\n" in index
    assert Path("docs/results/alone.md").read_text() == "# Words alone\n\nNo run.\n"
    assert page.startswith("# What moon does\n\nSix rounds.\n\n8 runs, seed 0, 1, 2.")
    assert "![What moon does: accuracy](../figures/sweep-accuracy.png)\n\n## Remarks\n\nIt wins.\n" in page
    assert " seconds |" not in page
    assert page.index("| **") < page.index("### Differences to FedAvg")  # methods by setting, the best in bold


def test_the_runs_own_target_is_of_the_accuracy_that_ends_them(tmp_path):
    own = [(10 * t, "personal", "test", "accuracy", value) for t, value in enumerate((0.1, 0.75, 0.6, 0.8))]
    for seed in (0, 1):
        write_run(tmp_path / str(seed), **method("ditto"), more=own, seed=seed, target_accuracy=0.72)
    runs = find([tmp_path])
    (row,) = tables.runs_table(runs, "t").numbers.to_dict("records")
    assert row["rounds to 72 % clients' accuracy"] == 10
    (row,) = tables.runs_table(runs, "t", 0.72).numbers.to_dict("records")  # asked for, of the table's accuracy
    assert row["rounds to 72 % test accuracy"] == 20


def test_long_curves_are_thinned_and_reach_a_target_in_the_same_round(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "MAX_POINTS", 5)
    accuracies = [0.1, 0.2, 0.1, 0.6, 0.3, 0.2, 0.25, 0.61, 0.3, 0.4, 0.5]
    run = read(
        write_run(tmp_path / "a", accuracies, clients=[(10, 0, "weight", 1), (10, 1, "weight", 3), (20, 0, "weight", 5)]), "a"
    )
    results.keep([run], tmp_path / "results", "a")
    (stored,) = results.load(tmp_path / "results" / "a.csv")
    rounds = [t for t, _ in stored.points("global", "test", "accuracy")]
    assert len(rounds) < 10
    assert {10, 30, 70, 100} <= set(rounds)
    for target in (0.2, 0.6, 0.61):
        at = next(t for t, value in run.points("global", "test", "accuracy") if value >= target)
        assert next(t for t, value in stored.points("global", "test", "accuracy") if value >= target) == at
        assert tables.mib_until(stored, at) == tables.mib_until(run, at)
    assert stored.number("accuracy_top5_mean") == run.number("accuracy_top5_mean")  # of the whole curve
    assert stored.mean_over_clients("weight") == run.mean_over_clients("weight") == [(10, 2.0), (20, 5.0)]
    assert stored.last_of_clients("weight") == {0: 5.0}


def test_what_is_kept_stays_whole_where_the_disk_is_full(tmp_path, monkeypatch, expect_error):
    run = read(write_run(tmp_path / "a", clients=[(10, 0, "weight", 1)]), "a")
    results.keep([run], tmp_path / "results", "a")
    before = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*.csv")}
    assert len(before) == 3
    real = pd.DataFrame.to_csv

    def half(self, path, **how):
        real(self.head(len(self) // 2), path, **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_csv", half)
    with expect_error():
        results.keep([run], tmp_path / "results", "a")
    assert {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()} == before


def test_what_is_kept_names_no_place_on_a_disk(tmp_path):
    place = "/home/somebody/alpha=0.1/cifar10.npz"
    write_run(tmp_path / "a", dataset={"name": "cifar10", "path": place}, changed=[f"dataset.path={place}", "seed=1"])
    results.keep([read(tmp_path / "a", "a")], tmp_path / "results", "a")
    assert "somebody" not in (tmp_path / "results" / "a.csv").read_text()
    (stored,) = results.load(tmp_path / "results" / "a.csv")
    assert stored.config["dataset"]["path"] == "cifar10.npz"
    assert stored.config["changed"] == ["dataset.path=cifar10.npz", "seed=1"]


@pytest.mark.figures
def test_a_sweep_leaves_a_table_and_a_figure(sweep, capsys):
    leave(sweep, sorted(path for path in sweep.iterdir()))
    assert "sweep.md, sweep.png" in capsys.readouterr().out
    assert "| moon | full | 2 |" in (sweep / "sweep.md").read_text()
    assert len(pd.read_csv(sweep / "sweep.csv")) == 4
    assert image.imread(sweep / "sweep.png").std() > 0.05


def test_a_sweep_of_one_or_of_nothing_leaves_nothing(sweep, capsys):
    leave(sweep, [sweep / "moon-full-0"])
    leave(sweep, [sweep / "nowhere"])
    assert "no table of the sweep, left out: there is no folder" in capsys.readouterr().out
    assert not list(sweep.glob("sweep.*"))


def test_names_of_results():
    assert pages.name_of(Path("/a/outputs/pmfl/table1-small")) == "pmfl-table1-small"
    assert pages.name_of(Path("/a/digits")) == "digits"


def test_numbers_of_clients_with_the_global_model(tmp_path):
    run = read(write_run(tmp_path / "a", scope=("global", "clients"), spread=(0.4, 0.3, 0.2, 0.1)), "a")
    assert run.number("clients_accuracy_best") == run.number("personal_accuracy_best") == 0.8
    assert run.number("personal_accuracy_best_std") == 0.2
    assert run.summary["own_model"] is False
    assert math.isnan(run.number("accuracy_final"))
    own = read(write_run(tmp_path / "b", scope=("personal", "test")), "b")
    assert own.summary["own_model"] is True
    assert math.isnan(own.number("clients_accuracy_best"))


def test_a_folder_may_be_named_twice(sweep):
    assert len(find([sweep, sweep, sweep / "moon-full-0"])) == len(find([sweep]))


def test_what_a_sweeps_table_leaves_out_is_said(sweep, capsys):
    write_run(sweep / "unfinished", summary={"status": "interrupted"})
    leave(sweep, sorted(path for path in sweep.iterdir()))
    said = capsys.readouterr().out
    assert "from the table of the sweep, left out: unfinished" in said
    assert "a table and a figure of" in said


def test_help_needs_neither_pandas_nor_torch():
    code = "import sys,contrafed.report_command as r; r.parser(); print({'pandas','torch','matplotlib','ray'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
