"""Composed configurations equal those of tests/compositions.json, which benchmarks/record.py wrote before the refactoring."""

import gzip
import json
import sys

import pytest
from helpers import slow
from messages import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import compositions
import record

DIGESTS = json.loads((ROOT / "tests" / "compositions.json").read_text(encoding="utf-8"))
GROUPS = sorted({name.partition("=")[0] for name in DIGESTS["choices"]})
FAST_GROUPS = ("aggregation", "partition", "participation", "privacy")
# Named cases, defences, and two papers' variants.
EXPERIMENTS = ("mpfedcon/table4", slow("fedrcl/table4"), slow("fedcosr/figure14"), slow("pmfl/table5"))


@pytest.fixture(scope="module")
def project():
    return compositions.adapt_project()


def test_no_experiment_is_gone(project):
    assert DIGESTS["experiments"].keys() <= {*project.choices["experiment"]}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiments_jobs_compose_as_before(project, experiment):
    rows = compositions.compose_experiment(project, experiment)
    assert record.digest_record(rows, not project.is_renamed)["experiments"] == {experiment: DIGESTS["experiments"][experiment]}


@pytest.mark.parametrize("group", [group if group in FAST_GROUPS else slow(group) for group in GROUPS])
def test_every_choice_of_a_group_composes_as_before(project, group):
    """Each choice alone, and each strategy with every method that accepts one. A new choice needs no digest."""
    chosen = [each for each in compositions.list_choices(project) if each[0].startswith(f"{group}=")]
    rows = [compositions.compose_choice(project, overrides) for overrides in chosen]
    known = {name: digest for name, digest in DIGESTS["choices"].items() if name.startswith(f"{group}=")}
    found = record.digest_record(rows, not project.is_renamed)["choices"]
    assert {name: found.get(name) for name in known} == known


def test_no_group_is_gone(project):
    assert {*GROUPS} <= project.choices.keys()


JOB = {"experiment": "paper/table", "scale": "full", "name": "pmfl-seed=0", "number": 0, "overrides": []}
CONFIG = {"num_clients": 8, "published": {"plot": {"x": "num_clients"}, "cells": [{"value": "a"}]}, "output_dir": "here"}


def write_record(folder, jobs, is_renamed=False, metrics="round\n1\n", golden=1):
    (folder / "runs").mkdir(parents=True)
    lines = "".join(f"{json.dumps(JOB | job)}\n" for job in jobs)
    (folder / "jobs.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "help.txt").write_text("help\n")
    (folder / "golden.json").write_text(json.dumps({"0.123456": ["tests/a.py"] * golden}))
    (folder / "about.json").write_text(json.dumps({"is_renamed": is_renamed}))
    (folder / "runs" / "pmfl-local.csv").write_text(metrics)
    return folder


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compare a record of one job with another, and return the exit status."""
    old = write_record(tmp_path / "old", [{"config": CONFIG}])

    def call(jobs=({"config": CONFIG},), **others):
        new = write_record(tmp_path / "new", jobs, **others)
        monkeypatch.setattr(sys, "argv", ["record.py", "compare", str(old), str(new)])
        return record.main()

    return call


def test_equal_records_have_no_differences(compare):
    assert compare([{"config": CONFIG | {"output_dir": "there"}}]) == 0


@pytest.mark.parametrize("value", [9, 8.0, "8"])
def test_a_changed_value_is_found(compare, capsys, value):
    assert compare([{"config": CONFIG | {"num_clients": value}}]) == 1
    assert f"num_clients: 8 -> {json.dumps(value)}  in 1, such as paper/table full pmfl-seed=0" in capsys.readouterr().out


@pytest.mark.parametrize("jobs", [[], [{"config": CONFIG}] * 2, [{"config": CONFIG, "scale": "small"}]])
def test_a_missing_job_and_one_too_many_are_found(compare, jobs):
    assert compare(jobs) == 1


@pytest.mark.parametrize("others", [{"metrics": "round\n2\n"}, {"metrics": "round\n1"}, {"golden": 2}])
def test_a_changed_byte_and_a_golden_value_are_found(compare, others):
    assert compare(**others) == 1


def test_a_renamed_key_is_no_difference(compare, monkeypatch):
    monkeypatch.setattr(record, "RENAMED", {"num_clients": "other"})
    monkeypatch.setattr(record, "RENAMED_VALUES", {"published.cells.value": {"a": "b"}})
    config = {"other": 8, "published": {"plot": {"x": "other"}, "cells": [{"value": "b"}]}}
    assert compare([{"config": config, "name": "other=8", "number": 3}], is_renamed=True) == 0


def test_jobs_are_paired_by_name_in_any_order_then_by_configuration():
    one, two = {"a": "1"}, {"a": "2"}
    old = [("pmfl-seed=0", 0, one), ("pmfl-seed=1", 1, two), ("moon", 2, {"b": "3"})]
    new = [("seed=1-pmfl", 0, one), ("seed=0-pmfl", 1, two), ("fedmoon", 2, {"b": "3"})]
    assert record.pair_jobs(old, new) == [(old[0], new[1]), (old[1], new[0]), (old[2], new[2])]
