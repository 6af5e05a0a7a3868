"""Reports say where one row's runs differ in more than their seed."""

import pytest
from reported import method, write_run

from contrafed.report import pages, results, results_pages
from contrafed.report.groups import MAX_MIXES, describe_mixes, group_runs
from contrafed.report.runs import find

DIFFERENT = {
    "data": ({"data_fingerprint": "aa"}, {"data_fingerprint": "bb"}, "data_fingerprint (aa, bb)"),
    "engine": ({"engine": "local"}, {"engine": "ray"}, "engine (local, ray)"),
    "commit": ({"commit": "c1"}, {"commit": "c2"}, "commit (c1, c2)"),
    "version": ({"versions": {"torch": "2.6"}}, {"versions": {"torch": "2.7"}}, "torch (2.6, 2.7)"),
}


def write_two(folder, first, second, name="fedavg"):
    for seed, summary in enumerate((first, second)):
        write_run(folder / f"{name}-{seed}", **method(name, seed=seed), summary=summary)


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr(pages.plots, "save", lambda figure, stem: [stem.with_suffix(".png"), stem.with_suffix(".pdf")])


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_row_of_unlike_runs_is_named_in_one_line(tmp_path, no_figures, what):
    first, second, said = DIFFERENT[what]
    write_two(tmp_path / "runs", first, second)
    write_two(tmp_path / "runs", first, first, "moon")
    pages.write(find([tmp_path / "runs"]), tmp_path / "report", "t")
    (line,) = [line for line in (tmp_path / "report" / "runs.md").read_text().splitlines() if said in line]
    assert f"fedavg: {said}" in line
    assert "moon" not in line
    results.keep(find([tmp_path / "runs"]), tmp_path / "results", "kept")
    results_pages.write_results_pages(tmp_path)
    assert line.replace("fedavg", "FedAvg") in (tmp_path / "docs" / "results" / "kept.md").read_text().splitlines()


def test_runs_that_differ_in_their_seed_alone_are_not_named(tmp_path):
    write_two(tmp_path / "runs", {"commit": "c1", "engine": "local"}, {"commit": "c1"})  # an older run has no engine
    write_two(tmp_path / "runs", {"commit": "c2"}, {"commit": "c2"}, "moon")
    assert describe_mixes(group_runs(find([tmp_path / "runs"]))) == ""


def test_many_rows_are_counted(tmp_path):
    for number in range(MAX_MIXES + 2):
        for seed in (0, 1):
            changes = {"partition__alpha": number + 1.0, "seed": seed}
            write_run(tmp_path / "runs" / f"{number}-{seed}", **changes, summary={"commit": str(seed)})
    line = describe_mixes(group_runs(find([tmp_path / "runs"])))
    assert line.count("commit (") == MAX_MIXES
    assert "2 rows more" in line
