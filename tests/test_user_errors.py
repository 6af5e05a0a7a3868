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

QUICK_RUN = ("engine=local", "num_clients=4", "num_rounds=1", "model=mlp", "model.hidden=[8]")


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        (["early_stop=3"], "dataset.merge_splits=true gives each one"),
        (["target_accuracy=0.5"], "dataset.merge_splits=true gives each one"),
        (["eval_clients=true"], "dataset.merge_splits=true gives each one"),
        (["eval_clients=true", "partition=sampled"], "partition=sampled gives none"),
    ],
)
def test_what_needs_a_score_is_refused_where_nothing_is_scored(asked, advice, tmp_path):
    with pytest.raises(UserError, match=f"no client has a test part of its own; {advice}"):
        run(config_of(*QUICK_RUN, "strategy=fedper", *asked, f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()


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
    ("asked", "said"),
    [
        (["output_dir=${oc.env:NO_SUCH_VARIABLE}/a"], "Environment variable 'NO_SUCH_VARIABLE' not found"),
        (["output_dir=runs/${strategy.nam}"], "output_dir: Interpolation key 'strategy.nam' not found"),
        (["-m", "strategy.local.lr=interval(0.01,0.1)"], "cannot be listed here: write the values out"),
        (["seed=0,1"], "seed=0,1 lists several values: add -m to run them all"),
        (["-m", "seed=0,1,"], "seed=0,1, ends with a comma: leave it out"),
        (["resume=latest"], "resume=latest goes on in the folder that output_dir names: set output_dir=FOLDER beside it"),
        (["-m", "resume=latest", "seed=0,1"], "resume=latest goes on in the folder that output_dir names"),
        (["experiment=fedcrl/base", "strategy=fedavg", "strategy.local=3"], "strategy.local"),
        (
            ["engine=local", "engine.memory_folder=/no/such"],
            "engine.memory_folder: /no/such is no folder that can be written in",
        ),
    ],
)
def test_what_no_run_can_take_is_one_line(call_command, asked, said):
    done = call_command(*asked)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("experimnt=pmfl/table1", "unknown key 'experimnt', did you mean 'experiment'?"),
        ("lr=0.1", "unknown key 'lr', did you mean strategy.local.lr?"),
        ("strategy.lr=0.1", "unknown key 'strategy.lr', did you mean strategy.local.lr?"),
        ("dataset.name=mnist", "dataset.name=mnist: what a group chooses is dataset=NAME, without .name"),
        ("grid.seed=[0]", "unknown key 'grid'; choices: aggregation, attack, "),
    ],
)
def test_a_key_in_another_place_is_named(override, said):
    with pytest.raises(UserError) as error:
        compose("experiment=digits", override)
    assert str(error.value).startswith(said)


def test_a_notebooks_list_of_values_is_one_line():
    with pytest.raises(UserError, match="seed=0,1 lists several values"):
        compose("strategy=fedavg", "seed=0,1")


def test_hidden_files_do_no_harm_and_another_encoding_is_one_line(tmp_path):
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "._mine.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "strategy" / ".#mine.yaml").symlink_to("nowhere")
    (tmp_path / "strategy" / "mine.yaml").write_bytes("# M\u00e9thode\nname: mine\n".encode("latin-1"))
    assert "._mine" not in registry.choices("strategy", tmp_path)
    assert "mine" in registry.choices("strategy", tmp_path)
    with pytest.raises(UserError, match="mine.yaml: not UTF-8"):
        compose("strategy=fedavg", config_dir=tmp_path)
    (tmp_path / "strategy" / "mine.yaml").unlink()
    assert compose("strategy=fedavg", config_dir=tmp_path).strategy.name == "fedavg"


@pytest.mark.parametrize("stopped", [KeyboardInterrupt, RuntimeError])
def test_a_run_that_ends_while_its_engine_starts_leaves_no_claim(tmp_path, monkeypatch, stopped):
    def starts(config, job):
        raise stopped

    monkeypatch.setattr("contrafed.engines.local.run", starts)
    again = config_of(*QUICK_RUN, "strategy=fedavg", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/run")
    with pytest.raises(stopped):
        run(again)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()  # by one that was killed
    monkeypatch.undo()
    assert run(again)["status"] == "finished"


def test_a_folder_in_which_another_process_writes_is_left_alone(tmp_path):
    """Also by a notebook and ``flwr run``, which resume in a run's folder without the command line."""
    resumed = config_of(*QUICK_RUN, "strategy=fedavg", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/run")
    run(resumed)
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.csv")}
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(UserError, match="another process writes in .*run"):
        run(resumed)
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.csv")} == before
    os.close(other)


def test_features_without_test_images_are_refused_before_the_run(tmp_path):
    nothing = ("dataset.merge_splits=true", "partition.test_fraction=0", "log=[features]")
    with pytest.raises(UserError, match=r"log=\[features\] needs test images on the server"):
        run(config_of(*QUICK_RUN, "strategy=fedavg", *nothing, f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()


def test_compose_and_run_take_what_they_say():
    for wrong in (["strategy=pmfl"], {"strategy": "pmfl"}):
        with pytest.raises(UserError, match="compose takes overrides as text, one by one"):
            compose(wrong)
    with pytest.raises(UserError, match="strategy=fedavg,moon lists several values: add -m to run them all"):
        compose("strategy=fedavg,moon")
    with pytest.raises(UserError, match="run takes what compose returns"):
        run("strategy=pmfl")


def test_a_run_in_which_no_reply_counts_says_so(tmp_path, capsys):
    asked = ("strategy=fedavg", "participation=full", "engine.max_norm=1e-6", f"output_dir={tmp_path}/run")
    assert run(config_of(*QUICK_RUN, *asked))["replies_rejected"] == 4
    assert "no reply counted in any round: the global model is the initial one" in capsys.readouterr().out.splitlines()


def test_a_run_without_a_step_has_replies_that_count(tmp_path, capsys):
    asked = ("strategy=fedavg", "participation=full", "strategy.local.iterations=0", "strategy.local.epochs=null")
    assert run(config_of(*QUICK_RUN, *asked, f"output_dir={tmp_path}/run"))["replies_rejected"] == 0
    assert "no reply counted" not in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fedavg", "fedavg strategy/server=fednova", "mifa"])
def test_a_rate_that_comes_to_0_is_refused_before_any_work(method, tmp_path):
    asked = (
        *QUICK_RUN,
        *f"strategy={method}".split(),
        "num_rounds=300",
        "strategy.local.lr_decay=0.05",
        f"output_dir={tmp_path}/run",
    )
    with pytest.raises(UserError, match=r"strategy.local.lr_decay=0.05: the learning rate of round 300 is 0"):
        run(config_of(*asked))


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


def test_flags_are_named(call_command):
    for wrong, says in (
        (["--num_rounds=3"], "error: --num_rounds=3: keys have no dashes, write num_rounds=3\n"),
        (
            ["-m", "seed=0,1", "--cfg", "job"],
            "error: --run, --multirun, --cfg, --info and --shell-completion exclude each other",
        ),
        (["--multirn", "seed=0,1"], "error: unknown option '--multirn', did you mean '--multirun'?"),
        (["-x", "seed=1"], "error: unknown option '-x', "),
        (["--cfg", "strategy"], "error: argument --cfg/-c: invalid choice: 'strategy'"),
        (["--package", "strategy"], "error: --package goes with --cfg"),
        (["--resolve"], "error: --resolve goes with --cfg"),
        (["--cfg", "job", "-p", "strategi"], "error: unknown package 'strategi', did you mean 'strategy'?"),
    ):
        done = call_command(*wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), wrong
        assert done.stderr.startswith(says)
    assert call_command("--version").stdout == f"contrafed {version('contrafed')}\n"
    part = call_command("strategy=fedcrl", "--cfg", "job", "--package=participation", "--resolve")
    assert yaml.safe_load(part.stdout) == compose("strategy=fedcrl")["participation"]


@pytest.mark.parametrize(
    ("group", "text", "message"),
    [
        ("experiment", "num_rounds: 2\n", "must begin with the line # @package _global_"),
        ("strategy/server", "server: anchor\n", "must begin with the line # @package strategy"),
        ("experiment", "# @package _global_\nwhere:\n  strategy=fedavgg: {num_rounds: 3}\n", "did you mean 'fedavg'"),
        ("experiment", "# @package _global_\nmethods:\n  fedavg: {weights: uniform}\n", "unknown key 'methods'"),
        ("experiment", "# @package _global_\nwhere:\n  dataset=cifr10: {num_rounds: 3}\n", "did you mean 'cifar10'"),
        ("experiment", "# @package _global_\nwhere:\n  datset=cifar10: {num_rounds: 3}\n", "did you mean 'dataset'"),
    ],
)
def test_a_yaml_of_ones_own_that_would_do_nothing_is_refused(tmp_path, group, text, message):
    file = tmp_path / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        resolve(compose("experiment=mine" if group == "experiment" else "strategy=fedavg", config_dir=tmp_path))


def test_a_sweep_without_a_table_says_why(tmp_path, call_command):
    done = call_command("-m", *QUICK_RUN, "strategy=fedper,lgfedavg", f"output_dir={tmp_path}/sweep")
    (line,) = [line for line in done.stdout.splitlines() if "no table" in line]
    assert "nothing was evaluated" in line


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("strategy=fedper",),
            "no client has a test part of its own to score its model on; dataset.merge_splits=true gives each one",
        ),
        (
            ("strategy=fedavg", "dataset.merge_splits=true", "partition.test_fraction=0"),
            "the server has no test images, so the global model is not scored",
        ),
        (("strategy=fedavg", "eval_clients=false"), ""),
        (("strategy=fedper", "dataset.merge_splits=true"), ""),
    ],
)
def test_a_run_says_what_nothing_scores(tmp_path, capsys, overrides, said):
    summary = run(
        config_of("engine=local", "num_clients=4", "num_rounds=1", "model=mlp", *overrides, f"output_dir={tmp_path}/run")
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "score" in line] == ([said] if said else [])
    assert 0 < summary["probability_mean"] < 1  # of the default, markovian participation
