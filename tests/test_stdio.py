"""Output without a reader: a closed pipe ends no run, and Ctrl-C with it is still Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest
from helpers import slow

from contrafed.core.stdio import outliving

RUN = (sys.executable, "main.py", "engine=local", "num_clients=8", "model=mlp", "tracker=none")


def start_run(folder, *overrides):
    """Start a run whose output has no reader from its second line on."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen((*RUN, *overrides, f"output_dir={folder}"), **pipes, start_new_session=True)
    assert process.stdout.readline().startswith("pmfl on digits")
    process.stdout.close()
    process.stdout = None
    return process


def test_a_run_goes_on_when_its_reader_is_gone(tmp_path):
    process = start_run(tmp_path / "run", "num_rounds=8", "eval_every=1")
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 8)


@pytest.mark.slow
def test_ctrl_c_that_ends_the_reader_too_leaves_everything_written(tmp_path):
    # The remaining output is written at the end.
    process = start_run(tmp_path / "run", "num_rounds=100000", "eval_every=100000")
    rounds, ends = tmp_path / "run" / "times.csv", time.monotonic() + 240
    while time.monotonic() < ends and not (rounds.exists() and rounds.read_text().count("\n") > 10):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "interrupted: what was finished, if anything, is in the run's folder\n")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] >= 5


@pytest.mark.parametrize("command", ["main.py --help", slow("report.py --help"), slow("main.py --cfg job")])
def test_what_only_shows_ends_well_without_a_reader(command):
    process = subprocess.Popen((sys.executable, *command.split()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


def test_the_streams_are_as_before_afterwards(capsys):
    before = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), outliving():
        print("said", end="")
        assert not sys.stdout.isatty()
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "said"
