"""Folders that somebody else wrote: what cannot be read is left out with one line, and the rest of a report is made."""

import csv
import os
from dataclasses import replace

import pandas as pd
import pytest
from reported import method, write_run

from contrafed import report_command
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config
from contrafed.report import results
from contrafed.report.runs import read
from contrafed.report.tables import Table
from contrafed.runs import checkpoint

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
