"""The pages of docs/results: one number in a cell, and a table of the papers' cells that single methods fill."""

from pathlib import Path

from reported import method, write_run

from contrafed.report import results, results_pages
from contrafed.report.runs import find


def test_a_paper_s_table_with_one_method_of_ours_is_a_row_for_each_cell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results_pages.plots, "save", lambda figure, stem: [stem.with_suffix(".png"), stem.with_suffix(".pdf")])
    cells = [{"setting": "bernoulli", "metric": f"{part}_accuracy", "value": "accuracy_final"} for part in ("test", "train")]
    for name, lr, count in (("pmfl", [], 1), ("fedau", [], 1), ("mifa", ["server_lr=2"], 1), ("fedvarp", ["server_lr=3"], 2)):
        published = {"paper": "pmfl", "table": "I", "dataset": "SVHN", "method": name, "cells": cells[:count]}
        write_run(tmp_path / "runs" / name, **method(name, published=published, changed=lr))
    results.keep(find([tmp_path / "runs"]), tmp_path / "results", "tried")
    results.keep(find([write_run(tmp_path / "own", (0.1, 0.5))]), tmp_path / "results", "own")
    results_pages.write_results_pages(tmp_path)
    page = Path("docs/results/tried.md").read_text()
    heads = [line for line in page.splitlines() if line.startswith("#")]
    columns = ["### SVHN bernoulli, test accuracy"]
    correlation = "### Spearman's correlation with the published values"
    assert heads == ["# tried", "## PMFL, Table I", *columns, correlation, "## Single methods", "## Figures", "## All runs"]
    assert "| PMFL | 70.00 | 87.47 | -17.47 | " in page
    assert "| PMFL, Table I | server_lr=2 | SVHN bernoulli, test accuracy | MIFA | 70.00 | " in page
    cells = [line for line in page.splitlines() if " | server_lr=3 | " in line]
    assert [line.split(" | ")[2] for line in cells] == ["SVHN bernoulli, train accuracy", "SVHN bernoulli, test accuracy"]
    assert "## Single methods" not in Path("docs/results/own.md").read_text()
