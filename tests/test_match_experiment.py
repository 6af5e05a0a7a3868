"""Runs in the place of another experiment's cells (``report.py --as``)."""

from itertools import product

import pandas as pd
import pytest
import yaml
from reported import write_run
from test_external_package import write

from contrafed import report_command
from contrafed.config.compose import compose_job, to_plain
from contrafed.report.groups import group_runs
from contrafed.report.match_experiment import match_runs
from contrafed.report.published import compare
from contrafed.report.runs import find
from contrafed.report.significance import build_differences, collect_scores
from contrafed.report.tables import runs_table


def run_of(folder, *overrides, accuracy=0.8, yamls=None, scope=("global", "test")):
    """Return a finished run of a command line, written by hand."""
    summary = {"accuracy_top5_mean": accuracy, "train_accuracy_top5_mean": 0.9, "personal_accuracy_last10_mean": accuracy}
    write_run(folder, (0.1, accuracy), scope=scope, summary=summary)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(compose_job(list(overrides), yamls))))
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
    assert f"error: --config-dir: there is no folder {tmp_path / 'elsewhere'}" in capsys.readouterr().err
    assert report_command.main(["--config-dir", str(yamls), str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == "error: --config-dir goes with --as EXPERIMENT\n"


MPFEDCON = ("experiment=mpfedcon/table1", "column=cifar10_2")
OWN_TABLE = """# @package _global_
defaults: [/experiment/mpfedcon/table1, _self_]
grid:
  column:
    mine_adam: {strategy.local.optimizer: adam, strategy.local.momentum: 0.0, strategy.local.lr: 0.001}
    again: {partition.classes_per_client: 5}
    named: {strategy.local.lr: 0.1, published.setting: my rate}
"""
OWN_ROWS = """# @package _global_
defaults: [/experiment/mpfedcon/table2, _self_]
grid:
  method:
    stronger: {strategy: mpfedcon, strategy.contrast_weight: 20.0}
    moon: {strategy: moon}
  strategy.local.lr: [0.01, 0.1]
"""


def test_an_own_column_of_a_papers_table_is_not_in_the_papers_cell(tmp_path):
    write(tmp_path / "yamls" / "experiment" / "mine.yaml", OWN_TABLE)
    for accuracy, column in ((0.5, "cifar10_2"), (0.6, "mine_adam"), (0.7, "again"), (0.8, "named")):
        asked = ("experiment=mine", f"column={column}", "strategy=mpfedcon")
        run_of(tmp_path / "runs" / column, *asked, accuracy=accuracy, yamls=tmp_path / "yamls", scope=("personal", "test"))
    (comparison,) = compare(find([tmp_path / "runs"]))
    assert comparison.title == "MpFedcon, Table 1 (experiment=mine)"
    cells = comparison.cells.dropna(subset="ours").set_index("setting")
    assert cells["ours"].to_dict() == {
        "clients=100 classes=2": 50,
        "clients=100 classes=5": 70,  # has the settings of the paper's column
        "clients=100 classes=2 mine_adam": 60,
        "my rate": 80,
    }
    assert cells["paper"].notna().tolist() == [True, True, False, False]


def test_an_own_row_of_a_papers_table_has_its_name(tmp_path):
    write(tmp_path / "yamls" / "experiment" / "mine.yaml", OWN_ROWS)

    def compose(method):
        return compose_job(["experiment=mine", "clients=m50", "rounds=t100", f"method={method}"], tmp_path / "yamls").published

    assert [compose(name).method for name in ("mu_5", "stronger", "moon")] == ["mpfedcon/mu=5", "mpfedcon/stronger", "moon"]
    assert compose("stronger").setting == compose("mu_5").setting
    asked = ["experiment=mine", "clients=m50", "rounds=t100", "method=mu_5", "strategy.local.lr=0.1"]
    assert compose_job(asked, tmp_path / "yamls").changed == ["strategy.local.lr=0.1"]  # an axis that the paper lacks


def write_methods(folder, *asked, names=("fedavg", "mpfedcon"), seeds=(0, 1)):
    for name, seed in product(names, seeds):
        number = len(list(folder.glob("*"))) if folder.exists() else 0
        run_of(folder / f"{number:02}", *MPFEDCON, f"strategy={name}", f"seed={seed}", *asked, accuracy=0.5 + 0.1 * seed)
    return folder


def test_what_an_experiment_sets_for_single_methods_is_no_setting(tmp_path):
    runs = find([write_methods(tmp_path, names=("fedavg", "local", "perfedavg", "mpfedcon"))])
    assert "model.projection" in dict(group_runs(runs)[0].setting)
    scores = collect_scores(runs)
    assert (list(scores.settings), set(scores.methods)) == ([""], {"fedavg", "local", "perfedavg", "mpfedcon"})
    assert set(build_differences(scores, "t").numbers["method"]) == {"local", "perfedavg", "mpfedcon"}
    assert runs_table(runs, "t").numbers["FedAvg's last test accuracy"].tolist() == pytest.approx([55] * 4)
    write_methods(tmp_path, "settings=printed")
    scores = collect_scores(find([tmp_path]))
    assert list(scores.settings) == ["settings=code", "settings=printed"]
    assert set(scores.methods) == {"fedavg", "local", "perfedavg", "mpfedcon"}


def test_what_a_user_varies_for_all_methods_is_a_setting(tmp_path):
    for projection in ("[64]", "[256,256]"):
        write_methods(tmp_path, f"model.projection={projection}")
    scores = collect_scores(find([tmp_path]))
    assert list(scores.settings) == ["model.projection=[64]", "model.projection=[256, 256]"]
    assert set(scores.methods) == {"fedavg", "mpfedcon"}


def test_a_run_that_two_settings_share_is_in_both(tmp_path):
    asked = ("experiment=pmfl/table1", "dataset=svhn", "participation=bernoulli")
    for name, settings in (("pmfl", "code"), ("pmfl", "printed"), ("fedau", "printed")):
        run_of(tmp_path / f"{name}-{settings}", *asked, f"strategy={name}", f"settings={settings}")
    runs = find([tmp_path])
    assert {(group.method, dict(group.setting)["settings"]) for group in group_runs(runs)} == {
        (name, settings) for name in ("pmfl", "fedau") for settings in ("code", "printed")
    }
    assert [set(c.cells.dropna(subset="ours")["method"]) for c in compare(runs)] == [{"pmfl", "fedau"}] * 2
    assert len(group_runs([run for run in runs if run.method == "fedau"])) == 1
    (found,) = match_runs([run for run in runs if run.method == "fedau"], "pmfl/table1")
    assert found.config["settings"] == "printed"


def test_an_unknown_experiment_and_another_kind_of_report_are_one_line(tmp_path, capsys):
    run = run_of(tmp_path / "run", *PMFL)
    assert report_command.main(["--as", "pmfl/tabel5", str(run)]) == 2
    assert "unknown experiment 'pmfl/tabel5', did you mean 'pmfl/table5'?" in capsys.readouterr().err
    assert report_command.main(["--list", "--as", "pmfl/table5", str(run)]) == 2
    assert "--as does not go with --list" in capsys.readouterr().err
