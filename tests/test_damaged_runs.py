"""A report of damaged folders: unreadable runs are left out with a line, and small runs are marked."""

import json

import pytest
from reported import method, write_run

from contrafed import report_command
from contrafed.core.errors import UserError
from contrafed.report.groups import usable
from contrafed.report.pages import leave
from contrafed.report.runs import find
from contrafed.report.statistics import first_at
from contrafed.report.tables import format_title, runs_table


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
