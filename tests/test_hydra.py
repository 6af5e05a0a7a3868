"""main.py is a Hydra program: its options, launchers, sweepers and folders, and this project's sweeper."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import check_overrides, config_of, slow
from messages import ROOT

from contrafed.config.checks import SECTIONS
from contrafed.config.run_config import resolve
from contrafed.report.results import load
from contrafed.runs.launch import check_objective, read_objective
from contrafed.runs.output.series import list_accuracies
from contrafed.runs.run import run

QUICK_RUN = (
    "engine=local", "num_clients=4", "num_rounds=2", "eval_every=1", "model=mlp", "model.hidden=[8]", "tracker=none",
    "participation=full",
)  # fmt: skip
FILES = ("metrics.csv", "model.safetensors", "participants.csv", "clients.csv")


def main(folder, *arguments, **environment):
    """Run the command in its own process, as a shell does."""
    asked = [sys.executable, str(ROOT / "main.py"), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(asked, cwd=folder, capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the folder of two jobs in sequence, in this process."""
    folder = tmp_path_factory.mktemp("alone")
    for seed in (0, 1):
        run(config_of(*QUICK_RUN, f"seed={seed}", f"output_dir={folder}/{seed}"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "setting"), [("joblib", "n_jobs=2"), ("submitit_local", "timeout_min=5")])
def test_a_launcher_of_hydras_leaves_the_files_of_one_job_at_a_time(tmp_path, alone, launcher, setting):
    asked = (f"hydra/launcher={launcher}", f"hydra.launcher.{setting}", *QUICK_RUN, "seed=0,1", "hydra.sweep.dir=jobs")
    done = main(tmp_path, "-m", *asked)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 jobs finished, 0 failed" in done.stdout
    for job in ("0", "1"):
        for file in FILES:
            assert (tmp_path / "jobs" / job / file).read_bytes() == (alone / job / file).read_bytes(), (job, file)
    assert (tmp_path / "jobs" / "sweep.md").is_file()


@pytest.mark.slow
def test_a_failed_job_of_a_launcher_leaves_the_others(tmp_path):
    wrong = ("partition=pathological", "partition.classes_per_client=3,20")
    done = main(tmp_path, "-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", *QUICK_RUN, *wrong, "output_dir=jobs")
    assert done.returncode == 2
    assert "1 of 2 jobs finished, 1 failed" in done.stdout
    assert (tmp_path / "jobs" / "0" / "summary.json").is_file()
    assert not (tmp_path / "jobs" / "1").exists()


def test_optuna_maximises_the_objective(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = ("strategy.temperature=interval(0.1,1)", "strategy.contrast_weight=interval(0,1)")
    sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1")
    done = call_command("-m", *sweeper, *QUICK_RUN, "strategy=pmfl", *space, "output_dir=jobs")
    assert done.returncode == 0, done.stderr
    found = yaml.safe_load((tmp_path / "jobs" / "optimization_results.yaml").read_text())
    reached = [json.loads((tmp_path / "jobs" / str(n) / "summary.json").read_text())["accuracy_final"] for n in range(3)]
    assert found["best_value"] == max(reached)
    assert set(found["best_params"]) == {"strategy.temperature", "strategy.contrast_weight"}
    best = yaml.safe_load((tmp_path / "jobs" / str(reached.index(max(reached))) / "config.yaml").read_text())
    assert best["strategy"]["temperature"] == found["best_params"]["strategy.temperature"]
    shown = call_command("-m", *sweeper, "hydra.sweeper.direction=minimize", "--cfg", "hydra")
    assert shown.returncode == 2  # -m and --cfg exclude each other


def test_a_search_that_evaluates_nothing_ends_with_its_first_run(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweeper = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1")
    asked = (*QUICK_RUN, "strategy=fedper", "strategy.local.lr=choice(0.1,0.2)", "output_dir=jobs")
    done = call_command("-m", *sweeper, *asked)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: objective: ")
    assert "selects on test data" not in done.stdout
    assert [path.name for path in (tmp_path / "jobs").glob("*/")] == ["0"]


def test_the_objective_is_what_a_summary_leads_with_or_the_number_that_is_named():
    summary = {"accuracy_final": 0.5, "personal_accuracy_mean": 0.75, "rounds": 3, "status": "finished", "interrupted": False}
    assert read_objective(summary, None) == 0.75
    assert read_objective({"accuracy_final": 0.5, "personal_accuracy_mean": None}, None) == 0.5
    assert read_objective({"personal_accuracy_mean": None}, None) is None
    assert read_objective(summary, "rounds") == 3.0
    for wrong in ("status", "interrupted", "acuracy_final"):
        with pytest.raises(Exception, match=f"objective '{wrong}'"):
            read_objective(summary, wrong)


@pytest.mark.parametrize(
    "name", ["personal_refit_accuracy_mean", "mcc_final", "bytes_up", "accuracy", "personal_blend_accuracy_mean"]
)
def test_an_objective_that_no_run_has_is_refused_before_the_run(name, tmp_path, expect_error):
    run = resolve(config_of("strategy=fedrep", f"objective={name}"))
    if name in ("accuracy", "personal_blend_accuracy_mean"):  # the latter is of another method
        with expect_error("objective"):
            check_objective(run)
    else:
        check_objective(run)


@pytest.mark.parametrize(
    ("name", "setting"),
    [("simulated_time", "clock=lognormal"), ("epsilon", "privacy=central"), ("rounds_to_target", "target_accuracy=0.5")],
)
def test_an_objective_that_needs_another_setting_is_refused_without_it(name, setting, expect_error):
    with expect_error("objective"):
        check_objective(resolve(config_of("strategy=fedavg", f"objective={name}")))
    check_objective(resolve(config_of("strategy=fedavg", f"objective={name}", setting)))


def test_every_accuracy_of_the_results_may_be_an_objective():
    for name in ("pmfl-table1", "mpfedcon-table1", "digits"):
        for found in load(ROOT / "results" / f"{name}.csv"):
            numbers = {key for key, value in found.summary.items() if "accuracy" in key and isinstance(value, float)}
            assert numbers <= {*list_accuracies(("refit", "untuned", "trained", "blend"))}


def test_what_is_shown_is_what_runs(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = (
        "experiment=mpfedcon/table2", "clients=m50", "rounds=t100", "method=mu_5", "scale=small", "engine=local",
        "tracker=none", "num_rounds=1",
    )  # fmt: skip
    shown = call_command(*asked, "output_dir=run", "--cfg", "job", "--resolve")
    assert shown.returncode == 0, shown.stderr
    config = yaml.safe_load(shown.stdout)
    assert config["strategy"]["contrast_weight"] == 5.0  # the case's
    assert config["num_clients"] == 20  # the scale's
    assert not {"grid", "where", "hydra"} & set(config)
    assert check_overrides(*asked, "output_dir=run").composed == config
    assert call_command(*asked, "output_dir=run", "dataset=digits", "partition.classes_per_client=2").returncode == 0
    ran = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert {key for key in config if ran.get(key) != config[key]} <= {"dataset", "partition", "published", "changed"}


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--cfg", "job"), "strategy:\n"),
        (("--cfg", "job", "--package", "strategy.local"), "# @package strategy.local\n"),
        (("--cfg", "hydra"), "hydra:\n"),
        (("--cfg", "hydra", "--package", "hydra.job"), "name: contrafed\n"),
        (("--cfg", "all", "--resolve"), "ContrafedSweeper"),
        (("--info", "searchpath"), "conf"),
        (("--info", "defaults"), "strategy/pmfl"),
        (("--info", "plugins"), "contrafed_sweeper"),
        slow(("--shell-completion", "install=bash"), "COMPREPLY"),
        (("--hydra-help",), "--shell-completion"),
        (("strategy=moon", "--cfg", "job", "strategy.temperature=0.3"), "temperature: 0.3"),
    ],
)
def test_hydras_options(call_command, arguments, wanted):
    done = call_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert wanted in done.stdout


def test_hydras_folders(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call_command(*QUICK_RUN, "hydra.run.dir=here").returncode == 0
    assert yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["output_dir"] == "here"
    assert call_command("-m", *QUICK_RUN, "seed=0", "hydra.sweep.dir=there").returncode == 0
    assert (tmp_path / "there" / "0" / "summary.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there"}
    subdir = "hydra.sweep.subdir=job${hydra.job.num}"
    refused = call_command("-m", *QUICK_RUN, "seed=0", subdir, "hydra.sweep.dir=unused")
    assert refused.returncode == 2
    assert "hydra.sweep.subdir" in refused.stderr
    assert call_command("-m", "hydra/sweeper=basic", *QUICK_RUN, "seed=0", subdir, "hydra.sweep.dir=basic").returncode == 0
    assert (tmp_path / "basic" / "job0" / "summary.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there", "basic"}


def test_a_job_in_another_folder_keeps_its_whole_path(call_command, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert call_command("-m", *QUICK_RUN, "seed=0", f"output_dir={tmp_path}/there").returncode == 0
    stored = yaml.safe_load((tmp_path / "there" / "0" / "config.yaml").read_text())
    assert stored["output_dir"] == f"{tmp_path}/there/0"


@pytest.mark.parametrize("key", ["output_dir", "hydra.run.dir"])
def test_a_mistake_leaves_the_folders_that_were_there_and_no_others(call_command, tmp_path, key):
    (tmp_path / "mine").mkdir()
    (tmp_path / "bad.npz").write_text("no npz")
    wrong = (*QUICK_RUN, "strategy=fedavg", "dataset=npz", f"dataset.path={tmp_path}/bad.npz")
    assert call_command(*wrong, f"{key}={tmp_path}/mine").returncode == 2
    assert (tmp_path / "mine").is_dir()
    assert call_command(*wrong, f"{key}={tmp_path}/new/inner").returncode == 2
    assert not (tmp_path / "new").exists()


def test_hydras_plus_may_stand_before_a_choice(call_command):
    shown = [call_command(f"{sign}experiment=digits", "--cfg", "job") for sign in ("+", "")]
    assert shown[0].returncode == 0
    assert shown[0].stdout.replace("+experiment", "experiment") == shown[1].stdout


def test_a_home_folder_is_found_after_an_equals_sign(call_command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "yamls" / "strategy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert call_command(*QUICK_RUN, "--config-dir=~/yamls", "hydra.run.dir=here").returncode == 0
    assert call_command("-m", *QUICK_RUN, "--config-dir=~/yamls", "seed=0", "output_dir=there").returncode == 0


@pytest.mark.parametrize("folder", ["output_dir", "hydra.run.dir"])
def test_a_run_that_changes_into_its_folder_has_its_files_there(call_command, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    done = call_command(*QUICK_RUN, "hydra.job.chdir=true", f"{folder}=here")
    assert done.returncode == 0, done.stderr
    assert Path.cwd() == tmp_path
    assert (tmp_path / "here" / "summary.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["output_dir"] == str(tmp_path / "here")


def test_hydras_ways_to_list_values(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call_command("-m", *QUICK_RUN, "num_rounds=1", "seed=range(0,2)", "output_dir=seeds").returncode == 0
    assert len(list((tmp_path / "seeds").glob("*/summary.json"))) == 2
    assert call_command("-m", *QUICK_RUN, "num_rounds=1", "strategy=glob(fedb*)", "output_dir=methods").returncode == 0
    ran = {yaml.safe_load(path.read_text())["strategy"]["name"] for path in (tmp_path / "methods").glob("*/config.yaml")}
    assert ran == {"fedbabu", "fedbn"}


def test_a_mistake_in_hydras_own_keys_is_one_line(call_command):
    for arguments in (("hydra/launcher=slurmy",), ("-m", "hydra/sweeper=optunna", "seed=0,1"), ("hydra.swep.dir=x",)):
        done = call_command(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("error: ")


def test_sections_of_an_experiment_are_no_keys(call_command):
    for section in SECTIONS[:2]:
        done = call_command("experiment=pmfl/table5", f"{section}=3")
        assert done.returncode == 2
        assert f"'{section}'" in done.stderr


def test_slurms_launcher_without_slurm_is_refused_before_a_folder_is_made(call_command, tmp_path, monkeypatch, expect_error):
    from contrafed.runs.setup import check_launcher

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with expect_error("hydra/launcher"):
        check_launcher("SlurmLauncher")
    done = call_command("-m", "hydra/launcher=submitit_slurm", *QUICK_RUN, "seed=0,1", "output_dir=jobs")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: hydra/launcher")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "srun").touch(0o755)
    check_launcher("SlurmLauncher")
