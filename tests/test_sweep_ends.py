"""The ends of a sweep's jobs: diverged ones, those of another process, and the folder that the jobs share."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import check_overrides
from hydra.core.utils import JobStatus
from test_sweep_runs import DIGITS_SWEEP, QUICK_RUN, list_finished, lock, sweeper_in

from contrafed.config.compose import expand_jobs
from contrafed.core.errors import UserError
from hydra_plugins.contrafed_sweeper import Left


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """Each test runs in an empty folder."""
    monkeypatch.chdir(tmp_path)


def test_a_job_that_another_process_runs_since_its_folder_was_chosen_is_no_failure():
    """joblib's jobs have their folders before the first begins."""
    job = expand_jobs(["experiment=digits", "strategy=fedavg", "participation=uniform", *QUICK_RUN, "seed=0"])[0]
    each = Left(job, check_overrides(*job.overrides), Path("home"))
    folder = Path("home") / job.name

    def record(error=UserError("output_dir: taken")):  # noqa: B008
        failed = SimpleNamespace(status=JobStatus.FAILED, _return_value=error)
        sweeper = sweeper_in("home", named=True)
        sweeper._there = {Path("home"): {}}
        sweeper._record(each, folder, failed)
        return len(sweeper.folders), sweeper.elsewhere, len(sweeper.failures)

    assert record() == (0, 0, 1)
    elsewhere = lock(folder)
    (folder / "config.yaml").write_text(each.run.text)
    assert record() == (0, 1, 0)
    (folder / "summary.json").write_text(json.dumps({"status": "finished", "rounds": 2, "num_rounds": 2}))
    os.close(elsewhere)
    assert record() == (1, 0, 0)
    assert record(UserError("objective: none")) == (0, 0, 1)
    (folder / "config.yaml").write_text(each.run.text.replace("seed: 0", "seed: 7"))
    assert record() == (0, 0, 1)


def test_a_job_that_diverges_at_its_end_is_finished_and_named(call_command):
    call = (*DIGITS_SWEEP, "seed=0", "strategy.server_lr=1,1e9")
    first, again = call_command(*call), call_command(*call)
    assert (first.returncode, again.returncode) == (0, 0)
    assert "2 of 2 jobs finished, 1 of them diverged, 0 failed" in first.stdout
    assert "2 of them finished already: 0 to run" in again.stdout


def test_a_long_name_of_a_job_is_a_name_of_a_folder():
    for letter in ("x", "я"):
        values = ",".join(f"{letter * 200}{number}" for number in (1, 2))
        names = [job.name for job in expand_jobs(["dataset=npz", f"dataset.path={values}"])]
        assert len(set(names)) == 2
        for name in names:
            Path(name).mkdir()


def test_the_home_folder_of_a_sweep(call_command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for line in ("output_dir=~/z", "hydra.sweep.dir=~/z"):
        assert call_command(*DIGITS_SWEEP, "seed=0", line).returncode == 0
    assert list_finished(tmp_path / "z") == ["fedavg-uniform-seed=0"]
    assert not Path("~").exists()


@pytest.mark.parametrize(
    "asked",
    [
        ["output_dir=a,b"], ["strategy=fedavg,moon", "output_dir=a/${strategy.name}"], ["output_dir=a", "hydra.sweep.dir=b"],
        ["output_dir=x", "hydra.run.dir=y"],
    ],
)  # fmt: skip
def test_a_sweep_has_one_folder(call_command, asked):
    options = [line for line in DIGITS_SWEEP if not line.startswith("strategy=")]
    options = options if "hydra.run.dir=y" not in asked else options[1:]
    done = call_command(*options, "seed=0", *asked)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("error: output_dir")
    assert not list(Path().iterdir())
