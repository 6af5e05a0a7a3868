"""A new user's mistakes: each gives one line that names the mistake or the missing part."""

import fcntl
import os
from importlib.metadata import version

import pytest
import yaml
from helpers import config_of
from omegaconf import OmegaConf

from contrafed import UserError, compose, run
from contrafed.config.run_config import resolve
from contrafed.core import registry
from contrafed.runs.output import print_summary

QUICK_RUN = ("engine=local", "num_clients=4", "num_rounds=1", "model=mlp", "model.hidden=[8]")


@pytest.mark.parametrize("choice", ["partition=sampled", "attack=label_flip", "partition=iid"])
def test_every_kind_of_partition_runs(choice, tmp_path):
    summary = run(config_of(*QUICK_RUN, "strategy=fedavg", choice, f"output_dir={tmp_path}/run"))
    assert summary["status"] == "finished"


@pytest.mark.parametrize("place", ["~/run", "runs/svhn-alpha=0.1-pmfl", "My Drive (1)/\u00e9t\u00e9", "a#b&c", "run/."])
def test_paths_need_no_quotes_of_their_own(place):
    for key in ("output_dir", "dataset.path", "resume"):
        config = compose("strategy=fedavg", "dataset=npz", f"{key}={place}")
        assert OmegaConf.select(config, key) == place


def test_a_home_is_found_in_a_runs_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(compose(*QUICK_RUN, "strategy=fedavg", "output_dir=~/run"))["folder"] == str(tmp_path / "run")
    again = compose(*QUICK_RUN, "strategy=fedavg", "init_from=~/run/model.safetensors", "output_dir=~/again")
    assert run(again)["status"] == "finished"


@pytest.mark.parametrize(
    "asked",
    [
        "output_dir=${oc.env:NO_SUCH_VARIABLE}/a",
        "output_dir=runs/${strategy.nam}",
        "-m strategy.local.lr=interval(0.01,0.1)",
        "seed=0,1",
        "-m seed=0,1,",
        "-m hydra/sweeper=optuna seed=0,1 shard=1/2",
        "resume=latest",
        "-m resume=latest seed=0,1",
        "experiment=fedcrl/base strategy=fedavg strategy.local=3",
        "engine=local engine.memory_folder=/no/such",
        "--num_rounds=3",
        "-m seed=0,1 --cfg hydra",
        "--multirn seed=0,1",
        "-x seed=1",
        "--cfg strategy",
        "--package strategy",
        "--resolve",
        "--cfg job -p strategi",
    ],
)
def test_what_no_run_can_take_is_one_line(call_command, expect_error, asked):
    done = call_command(*asked.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    expect_error.check(done.stderr)


def test_flags_that_show_something(call_command):
    assert call_command("--version").stdout == f"contrafed {version('contrafed')}\n"
    part = call_command("strategy=fedcrl", "--cfg", "job", "--package=participation", "--resolve")
    assert yaml.safe_load(part.stdout) == compose("strategy=fedcrl")["participation"]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("experimnt=pmfl/table1", "experimnt"),
        ("lr=0.1", "lr"),
        ("strategy.lr=0.1", "strategy.lr"),
        ("dataset.name=mnist", "dataset.name"),
        ("grid.seed=[0]", "grid"),
        ("seed=0,1", "seed"),
    ],
)
def test_a_key_in_another_place_is_named(expect_error, override, key):
    with expect_error(key):
        compose("experiment=digits", override)


def test_hidden_files_do_no_harm_and_another_encoding_is_one_line(tmp_path, expect_error):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "._mine.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "strategy" / ".#mine.yaml").symlink_to("nowhere")
    (tmp_path / "strategy" / "mine.yaml").write_bytes("# M\u00e9thode\nname: mine\n".encode("latin-1"))
    assert "._mine" not in registry.choices("strategy", tmp_path)
    assert "mine" in registry.choices("strategy", tmp_path)
    with expect_error("--config-dir"):
        compose("strategy=fedavg", config_dir=tmp_path)
    (tmp_path / "strategy" / "mine.yaml").unlink()
    assert compose("strategy=fedavg", config_dir=tmp_path).strategy.name == "fedavg"


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, RuntimeError, UserError])
def test_a_run_that_ends_while_its_engine_starts_leaves_no_claim(tmp_path, monkeypatch, stopped):
    def starts(config, job):
        raise stopped("no room")

    monkeypatch.setattr("contrafed.engines.local.run", starts)
    again = config_of(*QUICK_RUN, "strategy=fedavg", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/run")
    with pytest.raises(stopped):
        run(again)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()  # by one that was killed
    monkeypatch.undo()
    assert run(again)["status"] == "finished"


def test_a_folder_in_which_another_process_writes_is_left_alone(tmp_path, expect_error):
    """Also by a notebook and ``flwr run``, which resume in a run's folder without the command line."""
    resumed = config_of(*QUICK_RUN, "strategy=fedavg", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/run")
    run(resumed)
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.csv")}
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with expect_error("output_dir"):
        run(resumed)
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.csv")} == before
    os.close(other)


def test_compose_and_run_take_what_they_say(expect_error):
    for wrong, key in ((["strategy=pmfl"], "compose"), ({"strategy": "pmfl"}, "compose"), ("strategy=fedavg,moon", "strategy")):
        with expect_error(key):
            compose(wrong)
    with expect_error("run"):
        run("strategy=pmfl")


def test_a_run_in_which_no_reply_counts_says_so(tmp_path, capsys):
    asked = ("strategy=fedavg", "participation=full", "engine.max_norm=1e-6", f"output_dir={tmp_path}/run")
    assert run(config_of(*QUICK_RUN, *asked))["replies_rejected"] == 4
    assert "no reply was accepted in any round: the global model is the initial one" in capsys.readouterr().out.splitlines()


def test_a_run_without_a_step_has_replies_that_count(tmp_path, capsys):
    asked = ("strategy=fedavg", "participation=full", "strategy.local.iterations=0", "strategy.local.epochs=null")
    assert run(config_of(*QUICK_RUN, *asked, f"output_dir={tmp_path}/run"))["replies_rejected"] == 0
    assert "no reply was accepted" not in capsys.readouterr().out


def test_a_second_run_says_in_which_folder_it_is(tmp_path, capsys):
    config = config_of(*QUICK_RUN, "strategy=fedavg", f"output_dir={tmp_path}/run")
    first = run(config)
    assert "has a run already" not in capsys.readouterr().out
    assert (first["folder"], run(config)["folder"]) == (f"{tmp_path}/run", f"{tmp_path}/run-2")
    assert f"{tmp_path}/run has a run already: this one's folder is {tmp_path}/run-2\n" in capsys.readouterr().out


def test_one_job_of_a_table_is_said_to_be_one(tmp_path, call_command):
    asked = ("experiment=digits", *QUICK_RUN, "strategy=fedavg", "seed=0")
    one = call_command(*asked, "participation=uniform", f"output_dir={tmp_path}/one")
    assert "runs them all" not in one.stdout
    some = call_command(*asked, f"output_dir={tmp_path}/some")
    assert "this is one of 3 jobs: this line with -m runs them all" in some.stdout.splitlines()


@pytest.mark.parametrize(
    ("group", "text", "key"),
    [
        ("experiment", "num_rounds: 2\n", "--config-dir"),
        ("strategy/server", "server: anchor\n", "--config-dir"),
        ("experiment", "# @package _global_\nwhere:\n  strategy=fedavgg: {num_rounds: 3}\n", None),
        ("experiment", "# @package _global_\nmethods:\n  fedavg: {weights: uniform}\n", "methods"),
        ("experiment", "# @package _global_\nwhere:\n  dataset=cifr10: {num_rounds: 3}\n", None),
        ("experiment", "# @package _global_\nwhere:\n  datset=cifar10: {num_rounds: 3}\n", None),
    ],
)
def test_a_yaml_of_ones_own_that_would_do_nothing_is_refused(tmp_path, expect_error, group, text, key):
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with expect_error(key):
        resolve(compose("experiment=mine" if group == "experiment" else "strategy=fedavg", config_dir=tmp_path))


def test_a_sweep_without_a_table_says_why(tmp_path, call_command):
    done = call_command("-m", *QUICK_RUN, "strategy=fedper,lgfedavg", f"output_dir={tmp_path}/sweep")
    (line,) = [line for line in done.stdout.splitlines() if "no table" in line]
    assert "nothing was evaluated" in line


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ("strategy=fedper", 2),
        ("strategy=fedper dataset.merge_splits=true partition.test_fraction=0", 2),
        ("strategy=fedper eval_clients=false", 1),
        ("strategy=fedavg dataset.merge_splits=true partition.test_fraction=0", 2),
        ("strategy=fedavg eval_clients=false", 0),
        ("strategy=fedper dataset.merge_splits=true", 0),
    ],
)
def test_a_run_begins_and_ends_with_what_nothing_evaluates(tmp_path, capsys, expect_error, overrides, count):
    asked = ["engine=local", "num_clients=4", "num_rounds=1", "model=mlp"]
    summary = run(config_of(*asked, *overrides.split(), f"output_dir={tmp_path}/run"))
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluate" in line]
    print_summary(summary, "some/folder")
    lines += [line for line in capsys.readouterr().out.splitlines() if "evaluated" in line]
    assert len(lines) == count
    for line in lines:
        expect_error.check(line)
    assert 0 < summary["probability_mean"] < 1  # of the default, markovian participation
