"""The runs that a report finds, their labels, and their storage."""

from dataclasses import replace

import pytest
from reported import write_run

from contrafed.report import results
from contrafed.report.runs import find, read


def test_a_link_to_a_run_is_found_and_one_that_leads_back_ends(tmp_path):
    write_run(tmp_path / "elsewhere")
    write_run(tmp_path / "sweep" / "real")
    (tmp_path / "sweep" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "sweep" / "up").symlink_to(tmp_path / "sweep")
    assert sorted(run.name for run in find([tmp_path / "sweep"])) == ["link", "real"]


def test_a_run_has_its_folders_name_from_within_too(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "mine"))
    assert [run.name for run in find(["."])] == ["mine"]


def test_a_change_is_the_same_however_its_number_is_spelled(tmp_path):
    run = read(write_run(tmp_path / "a"), "a")
    spelled = [("strategy.local.lr=.1",), ("++strategy.local.lr=0.1",), ("+strategy.local.lr=1e-1",)]
    assert {replace(run, config={**run.config, "changed": list(c)}).changed_settings for c in spelled} == {
        ("strategy.local.lr=0.1",)
    }
    words = ["strategy=moon", "partition.arguments={a: 1}", "seed=1.0"]
    assert replace(run, config={**run.config, "changed": words}).changed_settings == (
        "partition.arguments={a: 1}",
        "seed=1",
        "strategy=moon",
    )


@pytest.mark.parametrize("name", ["pmfl/table1", "../runs", ".."])
def test_a_name_of_results_is_no_path(tmp_path, name, expect_error):
    with expect_error():
        results.keep([read(write_run(tmp_path / "a"), "a")], tmp_path / "results", name)
    assert not (tmp_path / "results").exists()
