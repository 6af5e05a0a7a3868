"""The command line: one clear line for every mistake, sweeps, help, and a run's files."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import METHODS, config_of, read_rows
from messages import ROOT

from contrafed.config.command_line import help_text
from contrafed.config.run_config import GROUPS, Top, server_of
from contrafed.core import registry
from contrafed.core.client_run import PACKAGES
from contrafed.runs.run import run
from contrafed.training.local_training import LocalTraining

QUICK_RUN = ("engine=local", "num_clients=4", "num_rounds=2", "eval_every=1", "model=mlp", "model.hidden=[8]")


def command(*arguments, timeout=900):
    """Run the command in its own process."""
    return subprocess.run([sys.executable, "main.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


# Mistakes in YAMLs and top-level keys alone. A wrong type or value within a group is left to the dataclass with the
# choice's code to say, and a missing data set for the data set: these import it.
EARLY_MISTAKES = """strategy=pfml
-m strategy=pmfl,pfml
strategy.server=fedam
strategy=fedcrl strategy.server=fedavgm
strategy.temprature=1
strategy.local.learning_rate=1
sed=1
+extra=1
~strategy
foo
strategy=fedavg,moon
num_rounds=many
num_clients=0
dataset=own
engine=flower resume=latest
evaluate_only=/no/such
evaluate_only=/no/such seed=1
init_from=/no/such
experiment=pmfl/tabel1
-m strategy=pfml,moon
--config-dir=/no/such strategy=mine
hydra.searchpath=[file:///no/such]
--cfg job
--help""".splitlines()


def test_a_mistake_is_answered_before_torch_flower_or_ray_are_imported():
    code = f"""
import sys
from contrafed import command
for arguments in {EARLY_MISTAKES!r}:
    sys.argv = ["main.py", *arguments.split()]
    assert command.main() == (0 if arguments.startswith("--") and "such" not in arguments else 2), arguments
    loaded = [name for name in ("torch", "flwr", "ray", "matplotlib", "pandas") if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(EARLY_MISTAKES) - 2
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def test_a_job_is_shown_wherever_the_flag_stands(call_command):
    wanted = ["experiment=fedrcl/base", "strategy=fedavg"]
    last = call_command(*wanted, "--cfg", "job")
    assert "alpha: 0.1" in last.stdout  # fedrcl/base's own, which Hydra alone does not know
    for arguments in (["--cfg", "job", *wanted], [wanted[0], "--cfg=job", wanted[1]], [wanted[0], "-c", "job", wanted[1]]):
        assert call_command(*arguments).stdout == last.stdout
    assert call_command(*wanted, "scale=null", "--cfg", "job").stdout == last.stdout


def test_the_jobs_of_a_sweep_are_listed_and_not_run(call_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = ("-m", "--cfg", "job", "experiment=digits", "strategy=fedavg,moon", "participation=full", "seed=0,1")
    shown = call_command(*wanted, "shard=2/2")
    each = "experiment=digits strategy={} participation=full seed=1"
    lines = [f"[job 1] {each.format('fedavg')}", f"[job 3] {each.format('moon')}", "2 jobs"]
    assert (shown.returncode, shown.stdout.splitlines()) == (0, lines)
    assert not list(tmp_path.iterdir())
    axes = call_command("-m", "--cfg", "job", "seed=0,1", "+hydra.sweeper.params.strategy='fedavg,moon'")
    assert axes.stdout.splitlines()[-1] == "4 jobs"
    for more in ("hydra/sweeper=optuna", "--resolve", "strategy.local.lr=-1", "--info"):
        refused = call_command(*wanted, more)
        assert (refused.returncode, refused.stdout, len(refused.stderr.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_composes_and_has_a_description_and_all_its_defaults_in_yaml(group):
    """No dataclass of a choice has a default value."""
    for name, text in registry.choices(group).items():
        assert len(text) > 10, name
        values = config_of(f"{group}={name}")[group]
        assert values["name"] == name
        assert defaults_of(registry.find(PACKAGES[group], group, values).Config) == [], name
        assert group != "strategy" or defaults_of(server_of(values).module.Config) == [], name


def test_the_top_level_keys_and_every_rule_have_their_defaults_in_yaml():
    for name, text in registry.choices("strategy/server").items():
        assert len(text) > 10, name
        values = config_of("strategy=fedavg", f"strategy.server={name}")["strategy"]
        assert defaults_of(server_of(values).module.Config) == [], name
    assert defaults_of(Top) == defaults_of(LocalTraining) == []


def defaults_of(config):
    """Return the fields of a dataclass that have a default in Python."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(config) if not (f.default is f.default_factory is missing)]


def test_help_shows_every_choice_with_its_line(call_command):
    text = help_text()
    for group in GROUPS:
        for name, line in registry.choices(group).items():
            assert f"{name} " in text
            assert line in text
    done = call_command("--help")
    assert done.returncode == 0
    assert done.stdout.strip() == text.strip()


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """Return the folder of a finished run of the real command, and its output."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    how = ["strategy=pmfl", "participation=full", "eval_train=true", "partition.test_fraction=0.25", "eval_clients=true"]
    done = command(*QUICK_RUN, *how, f"output_dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_leaves_everything(finished_run):
    folder, done = finished_run
    left = {path.name for path in folder.iterdir()}
    assert left == {
        "config.yaml", "metrics.csv", "clients.csv", "participants.csv", "times.csv", "summary.json", "accuracy.png",
        "participation.png", "partition.png", "tensorboard", "model.safetensors", "best.safetensors",
    }  # fmt: skip
    assert any((folder / "tensorboard").iterdir())
    assert done.stderr == ""
    assert "round 2/2" in done.stdout
    assert str(folder) in done.stdout


def test_metrics_are_tidy(finished_run):
    folder, _ = finished_run
    rows = read_rows(folder / "metrics.csv")
    assert list(rows[0]) == ["round", "scope", "split", "metric", "value"]
    seen = {(r["scope"], r["split"], r["metric"]) for r in rows}
    for split in ("train", "test"):
        assert {("global", split, "accuracy"), ("global", split, "loss")} <= seen
    assert {("global", "clients", "accuracy"), ("global", "clients", "accuracy_std")} <= seen
    assert {("global", "fit", "loss"), ("global", "system", "participants"), ("global", "system", "bytes_up")} <= seen
    assert [r["round"] for r in rows if (r["split"], r["metric"]) == ("test", "accuracy")] == ["0", "1", "2"]
    clients = read_rows(folder / "clients.csv")
    assert {"weight", "accuracy"} == {r["metric"] for r in clients}


def test_the_summary_says_what_ran(finished_run):
    folder, _ = finished_run
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.items() >= {"status": "finished", "method": "pmfl", "dataset": "digits", "seed": 0, "rounds": 2}.items()
    for key in ("accuracy_final", "accuracy_best", "accuracy_top5_mean", "accuracy_ema", "train_accuracy_final"):
        assert 0 <= summary[key] <= 1
    # Bytes by hand: 64x8+8 + 8x10+10 parameters of 4 bytes, for every participant of both rounds.
    rows = read_rows(folder / "metrics.csv")
    took_part = sum(int(r["value"]) for r in rows if r["metric"] == "participants")
    assert summary["parameters"] == 64 * 8 + 8 + 8 * 10 + 10
    assert summary["bytes_up"] == summary["bytes_down"] == 4 * summary["parameters"] * took_part
    assert {"flwr", "torch"} <= summary["versions"].keys()
    assert summary["seconds"] > 0


def test_the_saved_configuration_reproduces_the_run(finished_run, tmp_path):
    folder, _ = finished_run
    config = yaml.safe_load((folder / "config.yaml").read_text())
    again = Path(run(config | {"output_dir": str(tmp_path / "again")})["folder"])
    assert (again / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()
    assert (again / "clients.csv").read_bytes() == (folder / "clients.csv").read_bytes()
    other = Path(run(config | {"seed": 1, "output_dir": str(tmp_path / "other")})["folder"])
    assert (other / "metrics.csv").read_bytes() != (folder / "metrics.csv").read_bytes()


def test_a_named_folder_is_never_overwritten(finished_run, call_command):
    folder, _ = finished_run
    before = (folder / "metrics.csv").read_bytes()
    done = call_command(*QUICK_RUN, f"output_dir={folder}")
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert (folder / "metrics.csv").read_bytes() == before


def test_a_run_can_start_from_a_saved_model(finished_run, tmp_path, call_command):
    folder, _ = finished_run
    saved = folder / "model.safetensors"
    done = call_command(*QUICK_RUN, "strategy=pmfl", f"init_from={saved}", f"output_dir={tmp_path / 'on'}")
    assert done.returncode == 0, done.stderr

    def accuracies(where):
        rows = read_rows(where / "metrics.csv")
        return [r["value"] for r in rows if (r["split"], r["metric"]) == ("test", "accuracy")]

    assert accuracies(tmp_path / "on")[0] == accuracies(folder)[-1]
    wrong = call_command(*QUICK_RUN, "model.hidden=[9]", f"init_from={saved}", f"output_dir={tmp_path / 'no'}")
    assert wrong.returncode == 2
    assert "does not fit: encoder.stages.0.1.weight needs shape (9, 64), found shape (8, 64)" in wrong.stderr


def test_a_run_leaves_one_folder(tmp_path, call_command, monkeypatch):
    """For any number of seconds between the check of its configuration and its start."""
    monkeypatch.chdir(tmp_path)
    assert call_command(*QUICK_RUN, "engine=local").returncode == 0
    (folder,) = tmp_path.glob("outputs/*/*")
    assert (folder / "summary.json").exists()


def processes_with(mark):
    """Return the command lines of all processes whose environment contains ``mark``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc to look for processes")
def test_jobs_of_a_sweep_share_one_ray_and_leave_none_behind(tmp_path, monkeypatch):
    mark = f"CONTRAFED_TEST_MARK={tmp_path.name}-{os.getpid()}"
    monkeypatch.setenv(*mark.split("="))
    quick = ("engine=ray", "num_clients=4", "num_rounds=2", "model=mlp", f"output_dir={tmp_path / 'sweep'}")
    done = command("-m", *quick, "strategy=fedavg,pmfl")
    assert done.returncode == 0, done.stderr
    ends = time.monotonic() + 20  # Ray's processes end a moment after their driver
    while processes_with(mark.encode()) and time.monotonic() < ends:
        time.sleep(0.2)
    assert processes_with(mark.encode()) == []
    summaries = [json.loads(p.read_text()) for p in sorted((tmp_path / "sweep").glob("*/summary.json"))]
    assert [s["method"] for s in summaries] == ["fedavg", "pmfl"]
    assert all(s["failures"] == 0 for s in summaries)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_digits(tmp_path, method):
    summary = run(
        config_of(f"strategy={method}", "engine=local", "participation=full", "num_rounds=40", f"output_dir={tmp_path}/run")
    )
    assert summary["accuracy_final"] > 0.9
