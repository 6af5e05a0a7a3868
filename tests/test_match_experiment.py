"""Runs in the place of another experiment's cells (``report.py --as``)."""

import pandas as pd
import pytest
import yaml
from reported import write_run
from test_external_package import write

from contrafed import report_command
from contrafed.config.compose import compose_job, to_plain
from contrafed.report.match_experiment import match_runs
from contrafed.report.published import compare
from contrafed.report.runs import find


def run_of(folder, *overrides, accuracy=0.8):
    """Return a finished run of a command line, written by hand."""
    write_run(folder, summary={"accuracy_top5_mean": accuracy, "train_accuracy_top5_mean": 0.9})
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(compose_job(list(overrides)))))
    return folder


PMFL = ("experiment=pmfl/table1", "dataset=cifar10", "participation=bernoulli", "strategy=pmfl")


@pytest.mark.slow
def test_a_run_of_one_table_is_a_cell_of_another(tmp_path, capsys):
    run_of(tmp_path / "runs" / "whole", *PMFL, "eval_every=100")
    run_of(tmp_path / "runs" / "fedau", *PMFL[:3], "strategy=fedau", "eval_every=100")
    assert report_command.main(["--as", "pmfl/table5", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "of 1 run are in" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "out" / "pmfl-tablev-eval_every=100.csv").dropna(subset=["ours"])
    assert table[["setting", "method", "paper", "ours"]].to_numpy().tolist() == [
        ["bernoulli alpha=0.1 beta=0.1", "pmfl", 78.48, 80.0]
    ]


@pytest.mark.slow
def test_seeds_and_where_it_ran_make_no_other_cell_and_all_else_does(tmp_path, expect_error):
    same = run_of(tmp_path / "same", *PMFL, "seed=3", "engine=ray", "checkpoint_every=7")
    alpha = run_of(tmp_path / "alpha", *PMFL, "partition.alpha=0.5")
    other = run_of(tmp_path / "other", PMFL[0], "dataset=svhn", *PMFL[2:])
    own = run_of(tmp_path / "own", *PMFL, "strategy.temperature=0.7")
    small = run_of(tmp_path / "small", *PMFL, "scale=small")
    rounds = run_of(tmp_path / "rounds", *PMFL, "num_rounds=9")
    found = {run.folder: run.config for run in match_runs(find([same, alpha, small, rounds, own, other]), "pmfl/table5")}
    assert other not in found
    assert found[own]["changed"] == ["strategy.temperature=0.7"]
    assert found[same]["published"]["setting"] == "bernoulli alpha=0.1 beta=0.1"
    assert found[alpha]["published"]["setting"] == "bernoulli alpha=0.5 beta=0.1"
    assert found[alpha]["changed"] == []  # an axis of this table
    assert found[rounds]["changed"] == ["num_rounds=9"]
    assert found[small]["scale"] == "small"
    assert found[same]["seed"] == 3
    with expect_error():
        match_runs(find([other]), "pmfl/table5")


def test_a_method_that_needs_plain_sgd_and_a_grid_with_seeds(tmp_path):
    run = run_of(tmp_path / "run", "experiment=fedcosr/table2", "dataset=cifar10", "strategy=pfedme", "seed=2")
    (found,) = match_runs(find([run]), "fedcrl/table2")
    assert found.config["strategy"]["local"]["optimizer"] == "sgd"
    assert [comparison.name for comparison in compare([found])] == ["FedCRL, Table II"]


def test_an_experiment_of_ones_own(tmp_path, capsys):
    yamls = tmp_path / "yamls"
    write(yamls / "experiment" / "short.yaml", "# @package _global_\nnum_rounds: 7\ngrid: {strategy: [fedavg, moon]}\n")
    asked = ["--as", "short", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    run_of(tmp_path / "runs" / "any", "strategy=fedavg", "num_rounds=7")
    run_of(tmp_path / "runs" / "longer", "strategy=fedavg", "num_rounds=9", "dataset=cifar10")
    assert report_command.main([*asked, "--config-dir", str(yamls)]) == 0
    assert "of 1 run are in" in capsys.readouterr().out
    assert report_command.main(asked) == 2
    assert "unknown experiment 'short'" in capsys.readouterr().err
    assert report_command.main([*asked, "--config-dir", str(tmp_path / "elsewhere")]) == 2
    assert capsys.readouterr().err.endswith(f"error: --config-dir: there is no folder {tmp_path / 'elsewhere'}\n")
    assert report_command.main(["--config-dir", str(yamls), str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "error: --config-dir goes with --as EXPERIMENT\n"


def test_an_unknown_experiment_and_another_kind_of_report_are_one_line(tmp_path, capsys):
    run = run_of(tmp_path / "run", *PMFL)
    assert report_command.main(["--as", "pmfl/tabel5", str(run)]) == 2
    assert "unknown experiment 'pmfl/tabel5', did you mean 'pmfl/table5'?" in capsys.readouterr().err
    assert report_command.main(["--list", "--as", "pmfl/table5", str(run)]) == 2
    assert "--as does not go with --list" in capsys.readouterr().err
