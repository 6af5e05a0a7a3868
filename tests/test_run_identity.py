"""The identity of a run in tables, sweeps and messages about a command line."""

import fcntl
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import slow
from omegaconf import OmegaConf
from reported import method, write_run
from test_sweep_runs import DIGITS_SWEEP, call_command, list_finished  # noqa: F401

from contrafed.config.compose import compose_job
from contrafed.config.sweep_grid import select_axes
from contrafed.report import figures, pages, published, results, results_pages, tables
from contrafed.report.groups import MAX_MIXES, describe_mixes, find_varied_keys, group_runs, usable
from contrafed.report.runs import find, read
from contrafed.runs.checkpoint import identity
from contrafed.runs.output.folder import is_held_elsewhere
from hydra_plugins import contrafed_sweeper


def of_a_paper(server, **more):
    about = {"paper": "fedrcl", "table": "5", "method": "fedrcl", "dataset": "CIFAR-10", "setting": "", "cells": []}
    return {"strategy": {"name": "fedrcl", "server": server}, "published": about, **more}


def test_server_rules_beside_one_method_are_groups_of_their_own(tmp_path):
    """Also if the experiment names methods by their client alone."""
    rules = ("fedavg", "fedavgm", "fedexp", "fedvarp", "mifa", "fedadam")
    for k, rule in enumerate(rules):
        write_run(tmp_path / rule, (0.1, 0.1 + k / 10), **of_a_paper(rule))
    runs, _ = usable(find([tmp_path]))
    names = {"fedrcl" if rule == "fedavg" else f"fedrcl+{rule}" for rule in rules}
    assert {group.method for group in group_runs(runs)} == names


def test_a_run_of_before_a_key_was_has_it_at_the_value_that_it_came_with(tmp_path):
    """Moon's mu is 1 today. A run without the key is a seed of that value, and of no other."""
    old, rest = method("moon")["strategy"], {"temperature": 0.5}
    mu = OmegaConf.to_container(compose_job(["strategy=moon"]).strategy)["contrast_weight"]
    write_run(tmp_path / "old", (0.1, 0.5), strategy=old | rest)
    write_run(tmp_path / "new", (0.1, 0.6), strategy=old | rest | {"contrast_weight": mu}, seed=1)
    (group,) = group_runs(find([tmp_path]))
    assert sorted(group.numbers("accuracy_final")) == [0.5, 0.6]
    write_run(tmp_path / "other", (0.1, 0.9), strategy=old | rest | {"contrast_weight": mu + 7})
    found = {group.label: group.numbers("accuracy_final") for group in group_runs(find([tmp_path]))}
    assert found == {f"moon contrast_weight={mu:g}": [0.6, 0.5], f"moon contrast_weight={mu + 7:g}": [0.9]}


def test_what_is_kept_is_replaced_by_the_same_run_alone(tmp_path):
    """Another seed of the same name is another run. One with a further key is the same, from a later version."""
    for folder, more in (
        ("a", {}),
        ("b", {"seed": 1}),
        ("c", {"evaluate_after": "download"}),
        ("d", {"seed": 1, "evaluate_after": "download"}),
    ):
        run = read(write_run(tmp_path / folder, **more), "moon")
        results.keep([run], tmp_path / "results", "tried")
    stored = results.load(tmp_path / "results" / "tried.csv")
    assert [(run.name, run.config["seed"], run.config.get("evaluate_after")) for run in stored] == [
        ("moon", 0, "download"), ("moon-2", 1, "download"),
    ]  # fmt: skip


def test_a_clients_loss_that_is_no_number_is_kept_as_that(tmp_path):
    run = read(write_run(tmp_path / "a", clients=[(30, 0, "train_loss", "nan"), (30, 1, "train_loss", 0.5)]), "a")
    for _ in range(2):  # what is there is read before it is replaced
        results.keep([run], tmp_path / "results", "a")
    (stored,) = results.load(tmp_path / "results" / "a.csv")
    assert stored.last_of_clients("train_loss") == pytest.approx({0: math.nan, 1: 0.5}, nan_ok=True)


def test_a_number_that_not_all_seeds_have_says_how_many_do(tmp_path):
    write_run(tmp_path / "a", (0.1, 0.8), seed=0)
    write_run(tmp_path / "b", (0.1, math.nan), seed=1)
    table = tables.runs_table(find([tmp_path]), "title")
    row = dict(zip(table.heads, table.rows[0], strict=True))
    assert (row["seeds"], row["test accuracy, last"]) == ("2", "80.00 (1 of 2)")
    assert table.numbers["test accuracy, last, seeds"].tolist() == [1]


@pytest.mark.parametrize("server", ["fedavgm", slow("fedadam"), slow("fedagm")])
@pytest.mark.parametrize("strategy", ["fedavg", "fedrcl", "moon"])
def test_a_rule_of_fedrcls_table_5_is_in_the_methods_name(tmp_path, strategy, server):
    config = compose_job(["experiment=fedrcl/table5", f"strategy={strategy}", f"strategy.server={server}"])
    (run,) = find([write_run(tmp_path / "run", **OmegaConf.to_container(config, resolve=True))])
    assert run.method == (server if strategy == "fedavg" else f"{strategy}+{server}")
    if strategy != "moon":
        table = published.load("fedrcl")
        assert run.method in set(table[table["table"] == "5"]["method"])


@pytest.mark.parametrize("strategy", ["scaffold", "fedproto", "local"])
def test_table_5_takes_methods_whose_rule_is_their_own(strategy):
    assert compose_job(["experiment=fedrcl/table5", f"strategy={strategy}"]).published.method == f"{strategy}+own"


def test_a_variant_under_another_rule_is_a_method_of_its_own(tmp_path):
    for rule in ("pmfl", "fedavgm", "fedadam"):
        write_run(
            tmp_path / rule, strategy={"name": "pmfl", "server": rule}, published={"method": "pmfl/no_mct", "paper": "pmfl"}
        )
    assert {run.method for run in find([tmp_path])} == {"pmfl/no_mct", "pmfl/no_mct+fedavgm", "pmfl/no_mct+fedadam"}


def test_a_rule_whose_name_is_part_of_the_methods_is_said(tmp_path):
    for rule in ("fedavg", "fedavgm"):
        write_run(tmp_path / rule, strategy={"name": "fedavgm", "server": rule})
    assert {run.method for run in find([tmp_path])} == {"fedavgm", "fedavgm+fedavg"}


def test_a_key_with_the_name_of_a_fixed_column_has_a_column_of_its_own(tmp_path):
    for number, value in enumerate((3, 4)):
        strategy = {"name": "mine", "server": "fedavg", "rounds": value, "seeds": 5 * value, "num_rounds": 7 * value}
        write_run(tmp_path / str(number), strategy=strategy, num_rounds=30 + number)
    table = tables.runs_table(find([tmp_path]), "title")
    heads = ("method", "strategy.rounds", "strategy.seeds", "num_rounds", "strategy.num_rounds", "seeds", "rounds")
    assert set(table.heads[:7]) == set(heads)
    rows = [dict(zip(table.heads, row, strict=True)) for row in table.rows]
    assert sorted([row[head] for head in heads[1:6]] for row in rows) == [
        ["3", "15", "30", "21", "1"], ["4", "20", "31", "28", "1"],
    ]  # fmt: skip
    assert list(table.numbers["strategy.rounds"]) == ["3", "4"]


def test_what_one_method_alone_varies_is_no_panel_of_its_own(tmp_path, monkeypatch):
    write_run(tmp_path / "a")
    for weight in (1, 10):
        write_run(tmp_path / f"m{weight}", strategy={**method("moon")["strategy"], "contrast_weight": weight})
    found, drawn = group_runs(find([tmp_path])), []
    monkeypatch.setattr(figures.plots, "draw", lambda kind, panels, *rest, **window: drawn.append(panels))
    figures.accuracy(found, "t", "accuracy", lambda run: run.points("global", "test", "accuracy"))
    (panels,) = drawn
    assert {panel: set(lines) for panel, lines in panels.items()} == {
        "": {"fedavg", "moon contrast_weight=1", "moon contrast_weight=10"}
    }


def test_what_most_groups_of_one_method_have_goes_without_saying(tmp_path):
    for number, (epochs, lr) in enumerate(((1, 0.1), (5, 0.1), (1, 0.3), (1, 0.1))):
        strategy = {"name": "moon", "server": "fedavg", "local": {"lr": lr, "epochs": epochs}}
        write_run(tmp_path / str(number), seed=number, strategy=strategy)
    found, title = figures.quiet(group_runs(find([tmp_path])), "moon")
    assert title == "moon (learning rate = 0.1, local epochs = 1, unless the legend says otherwise)"
    assert [group.label for group in found] == ["moon", "moon local.epochs=5", "moon local.lr=0.3"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in ("a/same", "b/same", "b/other"):
        write_run(tmp_path / name)
    found = find([tmp_path / "a", tmp_path / "b"])
    assert [run.name for run in found] == [str(tmp_path / "a" / "same"), "other", str(tmp_path / "b" / "same")]


def test_a_cell_counts_a_seed_once(tmp_path):
    """Also if one of its runs is older than a key."""
    cells = [{"metric": "ema_accuracy", "setting": "", "value": "accuracy_final", "std": None}]
    about = of_a_paper("fedavgm")["published"] | {"cells": cells}
    for name, more in (("a", {}), ("b", {"partition__cut_test": False})):
        write_run(tmp_path / name, **of_a_paper("fedavgm") | {"published": about} | more)
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.cells.dropna(subset=["ours"])["seeds"].tolist() == [1]


def test_what_says_which_replies_count_makes_another_run(tmp_path):
    for name, limit in (("free", None), ("bound", 1.0)):
        write_run(tmp_path / name, **method("moon", engine={"name": "local", "max_norm": limit, "stack_size": len(name)}))
    runs = find([tmp_path])
    assert len(usable(runs)[0]) == 2
    assert find_varied_keys(runs) == ["engine.max_norm"]
    asked = compose_job(["experiment=pmfl/table1", "engine=local", "engine.max_norm=1", "engine.stack_size=2", "seed=3"])
    assert list(asked.changed) == ["engine.max_norm=1"]


def test_an_axis_that_a_file_does_without_is_no_axis():
    assert list(compose_job(["experiment=fedrcl/table6", "dataset=cifar10"]).changed) == ["dataset=cifar10"]
    assert list(compose_job(["experiment=fedrcl/table1", "dataset=cifar10"]).changed) == []


def test_one_is_one_however_it_is_written():
    grid = {"partition.alpha": [0.1, 1.0, 5.0], "strategy": ["pmfl", "fedau"]}
    axes, _ = select_axes(grid, {"partition.alpha": ["1", "5e0", "0.3"], "strategy": ["moon"]}, (), {})
    assert axes == {"partition.alpha": ["1.0", "5.0", "0.3"], "strategy": ["moon"]}
    assert (
        identity({"partition": {"alpha": 1}})
        == identity({"partition": {"alpha": 1.0}})
        != identity({"partition": {"alpha": 2}})
    )
    assert identity({"a": True}) != identity({"a": 1})
    for one in ("1", "1.0"):
        config = compose_job(["experiment=pmfl/table2", "strategy=pmfl", "participation=bernoulli", f"partition.alpha={one}"])
        assert config.published.setting == "bernoulli alpha=1.0"


def test_seeds_are_of_one_group_however_a_number_is_written(tmp_path):
    for seed, one in enumerate((1, 1.0)):
        write_run(tmp_path / f"{seed}", seed=seed, partition__alpha=one)
    write_run(tmp_path / "other", partition__alpha=0.5)
    found = {group.setting: len(group.runs) for group in group_runs(find([tmp_path]))}
    assert found == {(("partition.alpha", "1"),): 2, (("partition.alpha", "0.5"),): 1}


def test_what_is_written_down_beside_makes_no_other_run(tmp_path):
    asked = compose_job(["experiment=pmfl/table1", "log=[deviation]", "metrics=[accuracy,macro_f1]"])
    assert list(asked.changed) == []
    for name, more in (("plain", {}), ("logged", {"log": ["deviation"], "metrics": ["accuracy", "macro_f1"]})):
        write_run(tmp_path / name, **more)
    assert find_varied_keys(find([tmp_path])) == []


def test_a_long_list_of_changes_makes_no_name_that_cannot_be_written(tmp_path):
    about = of_a_paper("fedavgm")["published"] | {
        "cells": [{"metric": "ema_accuracy", "setting": "", "value": "accuracy_final", "std": None}]
    }
    for k in range(2):
        changed = [f"strategy.local.of_a_long_name_{i}={k}" for i in range(20)]
        write_run(tmp_path / str(k), **of_a_paper("fedavgm") | {"published": about, "changed": changed})
    stems = {comparison.stem for comparison in published.compare(find([tmp_path]))}
    assert len(stems) == 2
    assert max(map(len, stems)) < 200


def test_a_run_that_another_process_just_begins_is_waited_for_and_not_run_twice(call_command, monkeypatch):  # noqa: F811
    """After it claims its folder, while Ray starts, the folder does not identify the run yet."""
    done = call_command(*DIGITS_SWEEP, "seed=0")
    assert (done.status, list_finished("outputs/digits")) == (0, ["fedavg-uniform-seed=0"])
    folder = Path("outputs/digits/fedavg-uniform-seed=0")
    config, text = folder / "config.yaml", (folder / "config.yaml").read_text()
    (folder / "summary.json").unlink()
    config.write_text("")
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert is_held_elsewhere(folder)

    monkeypatch.setattr(contrafed_sweeper.time, "sleep", lambda seconds: config.write_text(text))  # between two looks
    again = call_command(*DIGITS_SWEEP, "seed=0")
    os.close(held)
    assert not is_held_elsewhere(folder)
    assert "another process begins a run of this name" in again.out
    assert "another process is at it" in again.out
    assert [path.name for path in Path("outputs/digits").iterdir()] == ["fedavg-uniform-seed=0"]


def test_a_finished_sweep_says_that_it_saved_no_personal_models(call_command):  # noqa: F811
    asked = ("-m", "experiment=digits", *DIGITS_SWEEP[2:-1], "strategy=fedper", "seed=0")
    assert call_command(*asked).status == 0
    again = call_command(*asked, "save_personal=true")
    assert again.status == 0
    assert "finished without saving its personal models" in again.out


def test_a_link_to_a_run_is_found_and_one_that_leads_back_ends(tmp_path):
    write_run(tmp_path / "elsewhere")
    write_run(tmp_path / "sweep" / "real")
    (tmp_path / "sweep" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "sweep" / "up").symlink_to(tmp_path / "sweep")
    assert sorted(run.name for run in find([tmp_path / "sweep"])) == ["link", "real"]


def test_a_run_has_its_folders_name_from_within_too(tmp_path, monkeypatch):
    monkeypatch.chdir(write_run(tmp_path / "mine"))
    assert [run.name for run in find(["."])] == ["mine"]


def test_a_change_is_the_same_however_its_number_is_spelled(tmp_path):
    run = read(write_run(tmp_path / "a"), "a")
    spelled = [("strategy.local.lr=.1",), ("++strategy.local.lr=0.1",), ("+strategy.local.lr=1e-1",)]
    assert {replace(run, config={**run.config, "changed": list(c)}).changed_settings for c in spelled} == {
        ("strategy.local.lr=0.1",)
    }
    words = ["strategy=moon", "partition.arguments={a: 1}", "seed=1.0"]
    assert replace(run, config={**run.config, "changed": words}).changed_settings == (
        "partition.arguments={a: 1}",
        "seed=1",
        "strategy=moon",
    )


@pytest.mark.parametrize("name", ["pmfl/table1", "../runs", ".."])
def test_a_name_of_results_is_no_path(tmp_path, name, expect_error):
    with expect_error():
        results.keep([read(write_run(tmp_path / "a"), "a")], tmp_path / "results", name)
    assert not (tmp_path / "results").exists()


DIFFERENT = {
    "weights": (
        {"weights_fingerprint": {"init_from": "1234567890123456"}}, {"weights_fingerprint": {"init_from": "1e12345678901234"}},
        "weights_fingerprint.init_from (1234567890123456, 1e12345678901234)",
    ),
    "engine": ({"engine": "local"}, {"engine": "ray"}, "engine (local, ray)"),
    "commit": ({"commit": "c1"}, {"commit": "c2"}, "commit (c1, c2)"),
    "version": ({"versions": {"torch": "2.6"}}, {"versions": {"torch": "2.7"}}, "torch (2.6, 2.7)"),
}  # fmt: skip


def write_two(folder, first, second, name="fedavg"):
    for seed, summary in enumerate((first, second)):
        write_run(folder / f"{name}-{seed}", **method(name, seed=seed), summary=summary)


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_row_of_unlike_runs_is_named_in_one_line(tmp_path, what):
    first, second, said = DIFFERENT[what]
    write_two(tmp_path / "runs", first, second)
    write_two(tmp_path / "runs", first, first, "moon")
    pages.write(find([tmp_path / "runs"]), tmp_path / "report", "t")
    (line,) = [line for line in (tmp_path / "report" / "runs.md").read_text().splitlines() if said in line]
    assert f"fedavg: {said}" in line
    assert "moon" not in line
    results.keep(find([tmp_path / "runs"]), tmp_path / "results", "kept")
    results_pages.write_results_pages(tmp_path)
    assert line.replace("fedavg", "FedAvg") in (tmp_path / "docs" / "results" / "kept.md").read_text().splitlines()


def test_runs_that_differ_in_their_seed_alone_are_not_named(tmp_path):
    write_two(tmp_path / "runs", {"commit": "c1", "engine": "local"}, {"commit": "c1"})  # an older run has no engine
    write_two(tmp_path / "runs", {"commit": "c2"}, {"commit": "c2"}, "moon")
    assert describe_mixes(group_runs(find([tmp_path / "runs"]))) == ""


def test_many_rows_are_counted(tmp_path):
    for number in range(MAX_MIXES + 2):
        for seed in (0, 1):
            changes = {"partition__alpha": number + 1.0, "seed": seed}
            write_run(tmp_path / "runs" / f"{number}-{seed}", **changes, summary={"commit": str(seed)})
    line = describe_mixes(group_runs(find([tmp_path / "runs"])))
    assert line.count("commit (") == MAX_MIXES
    assert "2 rows more" in line
