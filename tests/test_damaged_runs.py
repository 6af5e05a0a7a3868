"""A report of damaged folders: unreadable runs are left out with a line, and small runs are marked."""

import csv
import json
import os
from dataclasses import replace

import pandas as pd
import pytest
from reported import method, write_run

from contrafed import report_command
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config, read_summary
from contrafed.report import results
from contrafed.report.groups import usable
from contrafed.report.pages import leave
from contrafed.report.runs import find, read
from contrafed.report.statistics import first_at
from contrafed.report.tables import Table, format_title, runs_table
from contrafed.runs import checkpoint


def rewrite(path, change):
    path.write_text(change(path.read_text()))


@pytest.fixture
def pair(tmp_path):
    """Return an intact run and one that the tests damage."""
    write_run(tmp_path / "whole", **method("fedavg"), summary={"rounds": 30})
    write_run(tmp_path / "other", **method("pmfl"), summary={"rounds": 30})
    return tmp_path


DAMAGES = [
    ("config.yaml", lambda text: text.replace("num_rounds: 40", "num_rounds: two"), "is no run's configuration"),
    ("summary.json", lambda text: json.dumps(json.loads(text) | {"rounds": "two"}), "is no run's summary"),
    ("summary.json", lambda text: "{}", "is no run's summary"),
    ("metrics.csv", lambda text: "".join(text.splitlines(True)[:5]), "it ends with round 10, and the run with round 30"),
    ("metrics.csv", lambda text: "round\n", "it has no column scope"),
    ("clients.csv", lambda text: "round,value\n", "it has no column client"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_a_run_that_cannot_be_read_is_left_out_with_a_line(pair, capsys, name, damage, said):
    rewrite(pair / "other" / name, damage)
    damaged = []
    assert [run.name for run in find([pair], damaged)] == ["whole"]
    assert len(damaged) == 1
    assert str(pair / "other" / name) in damaged[0]
    assert said in damaged[0]
    for asked in ([str(pair)], ["--list", str(pair)]):
        assert report_command.main(asked) == 0
        assert f"left out: {damaged[0]}\n" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGES)
def test_where_there_is_no_other_run_it_is_a_mistake(pair, capsys, name, damage, said):
    rewrite(pair / "other" / name, damage)
    assert report_command.main([str(pair / "other")]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(UserError, match=said):
        find([pair])


def test_a_file_of_clients_that_ends_before_they_were_last_scored_is_no_whole_one(tmp_path, expect_error):
    clients = [(t, client, "accuracy", 0.5) for t in (0, 10, 20, 30) for client in range(4)]
    folder = write_run(tmp_path / "a", scope=("personal", "test"), clients=clients)
    assert len(find([folder])) == 1
    rewrite(folder / "clients.csv", lambda text: "".join(text.splitlines(True)[:10]) + "30,0,accur")
    with expect_error():
        find([folder])


def test_a_job_without_metrics_costs_a_sweep_no_table(pair, capsys):
    (pair / "empty").mkdir()
    (pair / "empty" / "config.yaml").write_text("x: 1\n")
    leave(pair, [pair / name for name in ("whole", "other", "empty")])
    said = capsys.readouterr().out
    assert "left out: there are no runs in" in said
    assert "a table and a figure of 2 runs" in said


def test_a_sweeps_table_leaves_it_out_too(pair, capsys):
    write_run(pair / "third", **method("moon"), summary={"rounds": 30})
    rewrite(pair / "other" / "metrics.csv", DAMAGES[3][1])
    leave(pair, [pair / name for name in ("whole", "other", "third")])
    assert "from the table of the sweep, left out: cannot read" in capsys.readouterr().out
    assert "pmfl" not in (pair / "sweep.csv").read_text()


def test_rounds_of_seeds_that_ended_apart_are_the_fewest_and_the_most(tmp_path):
    for seed, rounds in enumerate((20, 30)):
        write_run(tmp_path / str(seed), (0.1, 0.5, 0.8, 0.7)[: 1 + rounds // 10], seed=seed, summary={"rounds": rounds})
    table = runs_table(usable(find([tmp_path]))[0], "t")
    assert dict(zip(table.heads, table.rows[0], strict=True))["rounds"] == "20 to 30 of 40"


def test_runs_of_one_target_are_counted_to_it(tmp_path):
    for name in ("fedavg", "pmfl"):
        write_run(tmp_path / name, **method(name), target_accuracy=0.5)
    row = dict(zip((table := runs_table(find([tmp_path]), "t")).heads, table.rows[0], strict=True))
    assert row["rounds to 50 % test accuracy"] == "10"


def test_a_target_is_reached_to_within_rounding():
    mean = sum([0.1, 0.2, 0.3]) / 3
    assert mean > 0.2
    assert first_at([(1, 0.19), (2, 0.2)], mean) == 2
    assert first_at([(1, 0.2 - 1e-6)], 0.2) is None


def test_tables_and_figures_of_small_runs_say_so(tmp_path, capsys):
    for name in ("fedavg", "pmfl"):
        write_run(tmp_path / name, **method(name), scale="small", summary={"stand_in": "generated"})
    assert format_title(find([tmp_path / "pmfl"]), "mine") == "mine (generated images, scale=small)"
    assert report_command.main([str(tmp_path), "--title", "mine"]) == 0
    for name in ("runs.md", "runs.tex"):
        assert "mine (generated images, scale=small)" in (tmp_path / "report" / name).read_text()
    leave(tmp_path, [tmp_path / "fedavg", tmp_path / "pmfl"])
    assert (tmp_path / "sweep.md").read_text().startswith(f"# {tmp_path.name} (generated images, scale=small)\n")


def test_clients_without_a_file_are_in_no_figure(tmp_path, recwarn):
    clients = [(30, client, "accuracy", 0.5 + client / 10) for client in range(4)]
    for seed in range(2):
        write_run(tmp_path / str(seed), seed=seed, clients=clients)
    (tmp_path / "0" / "clients.csv").unlink()
    assert report_command.main([str(tmp_path)]) == 0
    assert [str(w.message) for w in recwarn if issubclass(w.category, RuntimeWarning)] == []
    assert (tmp_path / "report" / "clients.png").exists()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + above] * 9)}]\n" for above, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def put_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def put_huge(path):
    os.truncate(path, 1 << 33)


HARMS = {
    "nested summary": ("summary.json", lambda path: path.write_text("[" * 100_000)),
    "nested configuration": ("config.yaml", lambda path: path.write_text("[" * 5_000)),
    "bomb": ("config.yaml", lambda path: path.write_text(BOMB)),
    **{f"{name} {put.__name__}": (name, put) for put in (put_pipe, put_device, put_huge)
       for name in ("config.yaml", "summary.json", "metrics.csv", "clients.csv")},
}  # fmt: skip


@pytest.mark.parametrize("how", HARMS)
def test_a_report_leaves_out_what_would_do_harm(tmp_path, capsys, how):
    for name in ("fedavg", "pmfl"):
        write_run(tmp_path / name, **method(name), summary={"rounds": 30})
    file, harm = HARMS[how]
    harm(tmp_path / "pmfl" / file)
    assert report_command.main(["--list", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "fedavg" in said.out
    assert len(said.err.splitlines()) == 1
    assert file in said.err


@pytest.mark.parametrize("harm", [put_pipe, put_device, put_huge, lambda path: path.write_text("[" * 100_000)])
def test_a_checkpoint_that_would_do_harm_is_none(tmp_path, harm):
    place = tmp_path / "checkpoints" / "000001"
    place.mkdir(parents=True)
    (place / "state.json").write_text("{}")
    harm(place / "state.json")
    assert checkpoint.find(tmp_path) is None


def test_a_summary_that_is_a_pipe_is_none(tmp_path):
    os.mkfifo(tmp_path / "summary.json")
    assert read_summary(tmp_path) is None


def test_an_alias_in_a_text_is_none(tmp_path):
    (tmp_path / "config.yaml").write_text("a: 'b *c'\nd: [1]\n")
    assert read_config(tmp_path).items() >= {"a": "b *c", "d": [1]}.items()
    (tmp_path / "config.yaml").write_text(BOMB)
    with pytest.raises(UserError):
        read_config(tmp_path)


def test_text_in_a_csv_is_no_formula():
    texts = ["=1+1", "+x", "-x", "@x", "\tx", "fine", "-", "-0.5", "-1e-05", "'=x"]
    numbers = pd.DataFrame({"=run": texts, "value": [-1.0, *range(9)]})
    head, *lines = Table("t", ("run", "value"), (), numbers).csv.splitlines()
    assert head == "'=run,value"
    said = ["'=1+1", "'+x", "'-x", "'@x", "'\tx", "fine", "-", "-0.5", "-1e-05", "''=x"]
    assert [line.split(",")[0] for line in lines] == said
    assert lines[0].endswith(",-1.0")


def test_stored_results_have_no_formula_and_read_back_as_they_were(tmp_path):
    names, more = ("=SUM(A1)", "@b", "'=c", "-0.5"), [(10, "global", "train", "-loss", -0.5)]
    clients = [(10, 0, "=accuracy", -0.25)]
    runs = [
        replace(read(write_run(tmp_path / str(seed), seed=seed, more=more, clients=clients), name), name=name)
        for seed, name in enumerate(names)
    ]
    results.keep(runs, tmp_path / "results", "kept")
    for file in (tmp_path / "results").rglob("*.csv"):
        with file.open(newline="") as opened:
            cells = [cell for row in csv.reader(opened) for cell in row]
        assert not [cell for cell in cells if cell[:1] in tuple("=+@") or (cell[:1] == "-" and not cell[1:2].isdigit())]
    found = results.load(tmp_path / "results" / "kept.csv")
    assert [run.name for run in found] == list(names)
    for run, before in zip(found, runs, strict=True):
        assert run.points("global", "train", "-loss") == before.points("global", "train", "-loss") != []
        assert run.clients.values.tolist() == [list(clients[0])]


@pytest.mark.parametrize(
    "rows",
    [
        [(30, "global", "test", "accuracy", 0.7)],  # again
        [(5, "global", "test", "accuracy", 0.7)],
        [(40, "global", "test", "accuracy", 60.0)],
    ],
)
def test_rounds_in_disorder_and_accuracies_that_are_no_fractions_are_refused(tmp_path, rows, expect_error):
    write_run(tmp_path / "run", more=rows)
    with expect_error():
        find([tmp_path])


@pytest.mark.parametrize(("name", "old", "new"), [("curves/some.csv", "a,30,0.7", None), ("some.csv", ",0.8,", ",zzz,")])
def test_kept_results_that_disagree_are_refused(tmp_path, name, old, new, expect_error):
    write_run(tmp_path / "a", summary={"accuracy_best": 0.8})
    path = results.keep(find([tmp_path]), tmp_path / "results", "some").parent / name
    lines = path.read_text().splitlines()
    kept = [line.replace(old, new or old) for line in lines if new or not line.startswith(old)]
    assert kept != lines
    path.write_text("\n".join(kept) + "\n")
    with expect_error():
        results.load(tmp_path / "results" / "some.csv")
