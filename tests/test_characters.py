"""Names in any script, quotes and brackets, YAMLs of other editors, and outputs that cannot take what is printed."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import slow
from messages import ROOT

from contrafed.core.stdio import outliving

RUN = (sys.executable, "main.py", "strategy=fedavg", "engine=local", "num_clients=3", "model=mlp", "tracker=none")
SMALL = ("strategy=fedavg", "engine=local", "num_clients=3", "num_rounds=1", "model=mlp", "model.hidden=[4]", "tracker=none")


@pytest.mark.parametrize("name", ["été", "runs/Ольга", "数据", "runs/数据", "a b=é", "Müller, copy"])
def test_a_folder_may_have_any_name(call_command, name):
    done = call_command(f"output_dir={name}", "--cfg", "job", *([] if "," not in name else ["-m"]))
    if "," in name:  # a comma lists values
        assert (done.returncode, len(done.stderr.splitlines())) == (0, 0) or done.returncode == 2
    else:
        assert f"output_dir: {name}" in done.stdout.splitlines(), done


def test_data_may_have_any_name(tmp_path, call_command):
    (tmp_path / "été").mkdir()
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "été" / "Müller.npz", x=rng.integers(0, 256, (60, 8, 8), dtype=np.uint8), y=np.arange(60) % 3)
    line = (*SMALL, "dataset=npz", f"dataset.path={tmp_path}/été/Müller.npz", "partition=iid")
    assert call_command(*line, f"output_dir={tmp_path}/数据").returncode == 0
    assert json.loads((tmp_path / "数据" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("name", ["it's", "run[1]", "a{b}", 'say "x"', "back\\slash'", "$x'", "it's [a] {b}, c\\"])
def test_quotes_and_brackets_are_answered_with_what_works(call_command, name):
    refused = call_command(f"output_dir={name}", "--cfg", "job")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith("error: output_dir: ")
    (typed,) = shlex.split(refused.stderr.rpartition(" shells ")[2])
    shown = call_command(typed, "--cfg", "job", "--package", "output_dir")
    assert (shown.returncode, shown.stderr) == (0, "")
    from contrafed.config.compose import compose_job

    assert compose_job([typed]).output_dir == name


@pytest.mark.parametrize(("content", "works"), [("\ufeff{}".encode(), True), ("{}é".encode("latin-1"), False)])
def test_a_yaml_of_another_editor(tmp_path, call_command, content, works):
    (tmp_path / "experiment").mkdir()
    lines = b"# @package _global_\nnum_clients: 17\n# "
    (tmp_path / "experiment" / "e.yaml").write_bytes(content.replace(b"{}", lines) + b"\n")
    done = call_command(f"--config-dir={tmp_path}", "experiment=e", "--cfg", "job")
    if works:
        assert "num_clients: 17" in done.stdout.splitlines()
    else:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "e.yaml" in done.stderr


def test_an_argument_that_is_no_text_is_one_line():
    done = subprocess.run([*RUN, b"output_dir=\xff"], cwd=ROOT, capture_output=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


ENDS = {"closed": ">&-", "full": ">/dev/full", "all closed": ">&- 2>&- <&-"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_run_outlives_its_output(tmp_path, how):
    line = shlex.join([*RUN, "num_rounds=2", "eval_every=1", f"output_dir={tmp_path}/run"])
    done = subprocess.run(f"exec {line} {ENDS[how]}", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")
    assert len(done.stderr.splitlines()) == (how == "full"), done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert rows[0] == "round,scope,split,metric,value"
    assert all(len(row.split(",")) == 5 for row in rows)  # nothing that was printed


@pytest.mark.slow
def test_a_name_that_the_terminal_cannot_show(tmp_path):
    line, environment = [*RUN, "num_rounds=1", f"output_dir={tmp_path}/Ольга"], {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "Ольга" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_closes_ends_a_run_as_a_kill_does_unless_ignored(tmp_path, ignored):
    def begin():
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)

    line = [*RUN, f"num_rounds={100 if ignored else 100000}", "eval_every=100000", f"output_dir={tmp_path}/run"]
    process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=begin)
    rounds, ends = tmp_path / "run" / "times.csv", time.monotonic() + 240
    while time.monotonic() < ends and not (rounds.exists() and rounds.read_text().count("\n") > 5):
        time.sleep(0.02)
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=300)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (process.returncode, summary["status"]) == ((0, "finished") if ignored else (130, "interrupted"))
    assert len(errors.splitlines()) == (not ignored)


def start_run(folder, *overrides):
    """Start a run whose output has no reader from its second line on."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen((*RUN, *overrides, f"output_dir={folder}"), **pipes, start_new_session=True)
    assert process.stdout.readline().startswith("fedavg on digits")
    process.stdout.close()
    process.stdout = None
    return process


@pytest.mark.slow
def test_a_run_goes_on_when_its_reader_is_gone(tmp_path):
    process = start_run(tmp_path / "run", "num_rounds=8", "eval_every=1")
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 8)


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
