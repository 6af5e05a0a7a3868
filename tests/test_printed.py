"""What a run prints: the bar, validation accuracy and the method's whole name."""

import io
import json
import re

import pytest
from helpers import config_of

from contrafed.runs.output import Progress, print_summary
from contrafed.runs.run import run

WIDTHS = [(44, ("7/1000",)), (70, ("7/1000", "clients", "ETA")), (120, ("rounds/s", "ETA"))]


@pytest.mark.parametrize(("width", "shown"), WIDTHS)
def test_a_bar_fits_the_terminal(monkeypatch, width, shown):
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    with Progress(1000, "a run") as progress:
        progress.update(7, 50, 0.25, 1.5)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "…" not in text
    assert all(word in text for word in ("25.00%", *shown))


def test_a_run_without_test_data_shows_its_validation_accuracy(tmp_path, capsys):
    small = ("strategy=fedrep", "engine=local", "num_clients=3", "num_rounds=1", "eval_every=1", "model=mlp")
    run(config_of("experiment=search", *small, "model.hidden=[8]", f"output_dir={tmp_path}/run"))
    out = capsys.readouterr().out
    assert re.search(r"round 1/1  validation accuracy +\d", out)
    print_summary(json.loads((tmp_path / "run" / "summary.json").read_text()), "here")
    out = capsys.readouterr().out
    assert re.search(r"personal validation accuracy: \d+\.\d+%, best \d", out)
    assert "final -" not in out


def test_titles_name_another_strategy(tmp_path, capsys):
    small = ("strategy=fedavg", "strategy.server=fedadam", "engine=local", "num_clients=3", "num_rounds=1", "model=mlp")
    run(config_of(*small, "model.hidden=[8]", f"output_dir={tmp_path}/run"))
    assert capsys.readouterr().out.startswith("fedavg+fedadam on digits")
