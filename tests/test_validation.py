"""Validation data: where they come from, and what is selected by them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import config_of, read_rows, same, sized_workspace
from hydra.types import RunMode
from reported import write_run
from safetensors import safe_open
from safetensors.torch import load_file
from test_loaded import load, write_images
from test_stopping import NO_LEARNING, SIX_ROUNDS, accuracies, metrics
from tiny import TINY_RUN, tiny_workspace

from contrafed.data.label_flip import flip_labels
from contrafed.data.loaded import describe_loaded
from contrafed.data.stratified import cut_stratified
from contrafed.report.pages import format_selection
from contrafed.report.runs import read
from contrafed.runs import launch
from contrafed.runs.output.series import summary_of_curves
from contrafed.runs.run import run

OWN = "partition.validation_fraction=0.2"
CENTRAL = "dataset.validation_fraction=0.2"
QUICK = (*SIX_ROUNDS, "num_rounds=3")


def with_method(name, *overrides):
    return [override for override in overrides if not override.startswith("strategy=")] + [f"strategy={name}"]


def validation_curve(folder, scope="global"):
    rows = [r for r in metrics(folder) if (r["scope"], r["split"], r["metric"]) == (scope, "validation", "accuracy")]
    return {int(row["round"]): float(row["value"]) for row in rows}


def test_a_cut_is_in_proportion_and_leaves_an_example_of_each_class():
    y = np.repeat([0, 1, 2], [40, 8, 1])
    left, held = cut_stratified(np.arange(49), y, 0.25, np.random.default_rng(0))
    assert np.bincount(y[held], minlength=3).tolist() == [10, 2, 0]
    assert sorted([*left, *held]) == list(range(49))
    few = np.arange(4)
    assert len(cut_stratified(few, few, 0.5, np.random.default_rng(0))[1]) == 0  # one example of each class


@pytest.mark.parametrize("partition", ["dirichlet", "pathological", "iid"])
def test_a_clients_validation_part_comes_from_its_training_part_and_moves_nothing_else(partition):
    _, with_it, _ = tiny_workspace(f"partition={partition}", OWN)
    _, without, _ = tiny_workspace(f"partition={partition}")
    cut, whole = with_it.federation.partition, without.federation.partition
    for client in range(cut.num_clients):
        assert sorted(np.concatenate([cut.train(client), cut.validation(client)])) == sorted(whole.train(client))
        assert (cut.test(client) == whole.test(client)).all()
    assert 0 < cut.validation_sizes.sum() <= 0.21 * whole.sizes.sum()
    assert not whole.validation_sizes.any()
    assert without.federation.data.fingerprint == with_it.federation.data.fingerprint


def test_a_central_split_is_dealt_to_nobody_and_has_no_influence_on_mean_and_std():
    _, workspace, _ = tiny_workspace(CENTRAL)
    data, partition = workspace.federation.data, workspace.federation.partition
    held = workspace.federation.central_validation
    assert len(held) == pytest.approx(0.2 * 0.75 * 1797, rel=0.02)
    dealt = np.concatenate([part(k) for k in range(6) for part in (partition.train, partition.test)])
    assert not set(held) & {*dealt, *workspace.federation.central_test}
    assert data.mean[0] == pytest.approx(float((data.x[~data.held_out] / 255).double().mean()), abs=1e-6)
    assert tiny_workspace()[1].federation.data.fingerprint != data.fingerprint


def test_attackers_keep_their_validation_parts():
    _, workspace, _ = tiny_workspace(OWN)
    data, partition = workspace.federation.data, workspace.federation.partition
    more, flipped = flip_labels(replace(data, validation=data.test), partition, (1, 3))
    assert (flipped.validation_sizes == partition.validation_sizes).all()
    assert (flipped.validation(3) == partition.validation(3)).all()
    assert len(more.validation) == len(more.y) > len(data.y)


def test_a_folders_val_is_validation_data(tmp_path):
    for split, count in (("train", 4), ("test", 2), ("val", 3)):
        write_images(tmp_path / split, ["a", "b"], count)
    data = load("folder", tmp_path)
    assert describe_loaded(data).endswith("8 train, 4 test, 6 validation")
    assert data.warnings == ()
    assert describe_loaded(load("folder", tmp_path, merge_splits="true")).endswith("18 train, 0 test")


def test_best_is_selected_by_the_validation_accuracy():
    test, checked = [(1, 0.5), (2, 0.9), (3, 0.7)], [(1, 0.1), (2, 0.2), (3, 0.3)]
    curves = {(scope, "test", "accuracy"): test for scope in ("global", "personal")}
    curves |= {("personal", "test", "accuracy_std"): [(t, t / 10) for t in (1, 2, 3)], ("global", "test", "mcc"): test}
    own = summary_of_curves(curves | {(scope, "validation", "accuracy"): checked for scope in ("global", "personal")})
    assert (own["accuracy_best"], own["personal_accuracy_best"], own["personal_accuracy_best_std"]) == (0.7, 0.7, 0.3)
    assert (own["mcc_best"], own["validation_accuracy_best"], own["accuracy_top5_mean"]) == (0.7, 0.3, pytest.approx(0.7))
    on_test = summary_of_curves(curves | {("global", "validation", "accuracy"): checked}, select_on="test")
    assert on_test["accuracy_best"] == summary_of_curves(curves)["accuracy_best"] == 0.9


@pytest.mark.parametrize(
    ("method", "scope", "data"),
    [("fedavg", "global", OWN), ("fedavg", "global", CENTRAL), ("fedper", "personal", OWN)],
)
def test_a_run_selects_on_validation_data_where_there_are_any(tmp_path, capsys, method, scope, data):
    saved = ["save_personal=true"] if scope == "personal" else []
    summary = run(config_of(*with_method(method, *QUICK), data, *saved, "early_stop=2", f"output_dir={tmp_path}/run"))
    curve = validation_curve(tmp_path / "run", scope)
    best = max(curve, key=lambda t: (t > 0, curve[t], -t))
    assert (summary["select_on"], summary["best_round"]) == ("validation", best)
    prefix = "personal_" if scope == "personal" else ""
    assert summary[f"{prefix}accuracy_best"] == accuracies(tmp_path / "run", scope)[best]
    with safe_open(tmp_path / "run" / "best.safetensors", "pt") as file:
        assert (file.metadata()["round"], file.metadata()["selected_on"]) == (str(best), "validation")
    if saved:
        assert len(list((tmp_path / "run" / "personal-best").iterdir())) == 6
    out = capsys.readouterr().out
    assert "selects on test data" not in out
    assert f"round {best}" in out or "fedavg" in out


def test_the_best_models_are_those_of_the_best_round(tmp_path):
    """A run that ends with the best round saves the same models last."""
    longer = (*with_method("fedper", *SIX_ROUNDS), "save_personal=true", OWN)
    best = run(config_of(*longer, "strategy.local.lr=0.5", f"output_dir={tmp_path}/run"))["best_round"]
    last = run(config_of(*longer, "strategy.local.lr=0.5", f"num_rounds={best}", f"output_dir={tmp_path}/last"))
    assert last["best_round"] == best
    for name in ("best.safetensors", *(f"personal-best/{k}.safetensors" for k in range(6))):
        assert same(load_file(tmp_path / "run" / name), load_file(tmp_path / "last" / name)), name
    for k in range(6):
        assert same(
            load_file(tmp_path / "last" / f"personal/{k}.safetensors"),
            load_file(tmp_path / "last" / f"personal-best/{k}.safetensors"),
        )


def test_selecting_on_test_data_is_said_in_one_line(tmp_path, capsys):
    asked = (*QUICK, NO_LEARNING, OWN, "select_on=test", "early_stop=1")
    summary = run(config_of(*asked, f"output_dir={tmp_path}/run"))
    assert (summary["select_on"], summary["stopped_by"]) == ("test", "early_stop")
    assert sum("selects on test data" in line for line in capsys.readouterr().out.splitlines()) == 1


def test_the_objective_of_a_search_is_the_validation_accuracy():
    summary = {"select_on": "validation", "accuracy_final": 0.9, "validation_accuracy_final": 0.4}
    assert launch.read_objective(summary, None) == 0.4
    assert launch.read_objective(summary | {"select_on": "test"}, None) == 0.9


@pytest.mark.parametrize(
    ("sweeper", "name", "select_on", "warned"),
    [
        ("OptunaSweeper", None, "test", True),
        ("OptunaSweeper", None, "validation", False),
        ("OptunaSweeper", "accuracy_best", "validation", True),
        ("OptunaSweeper", "validation_accuracy_best", "validation", False),
        ("BasicSweeper", None, "test", False),
    ],
)
def test_a_search_by_test_data_is_said_in_one_line(monkeypatch, sweeper, name, select_on, warned):
    job = SimpleNamespace(mode=RunMode.MULTIRUN, sweeper={"_target_": f"somewhere.{sweeper}"})
    monkeypatch.setattr(launch.HydraConfig, "get", lambda: job)
    monkeypatch.setattr(launch.HydraConfig, "initialized", lambda: True)
    assert bool(launch.warn_of_objective({"select_on": select_on}, name)) == warned


def test_a_report_says_on_what_was_selected(tmp_path):
    plain = read(write_run(tmp_path / "a", (0.1, 0.5, 0.7)), "a")
    checked = [(10, "global", "validation", "accuracy", 0.4), (20, "global", "validation", "accuracy", 0.3)]
    selected = read(write_run(tmp_path / "b", (0.1, 0.5, 0.7), more=checked, summary=False), "b")
    assert selected.number("accuracy_best") == 0.5
    assert format_selection([plain]) == ""
    assert "1 of 2 runs" in format_selection([plain, selected])


def test_clients_are_evaluated_alike_in_a_stack_and_alone_also_without_validation_data():
    workspace = sized_workspace("fedper", [9, 5, 7])
    partition = workspace.federation.partition
    parts = [partition.train(0)[:4], partition.train(1)[:0], partition.train(2)[:2]]
    partition.validation, received = parts.__getitem__, {f"model/{n}": v for n, v in workspace.initial.items()}
    received = {n: v for n, v in received.items() if "classifier" not in n}
    found = workspace.client_class(workspace, range(3)).evaluate_clients([received] * 3, 1, validation=True)
    assert [one.validation["validation/num-examples"] for one in found] == [4, 0, 2]
    for client, one in enumerate(found):
        (alone,) = workspace.client_class(workspace, [client]).evaluate_clients([received], 1, validation=True)
        assert one.validation == pytest.approx(alone.validation, abs=1e-9)
        assert one.metrics == pytest.approx(alone.metrics, abs=1e-9)


@pytest.mark.parametrize(("method", "best"), [("fedavg", 3), ("fedper", 1)])
def test_a_resumed_run_has_the_same_best_models(tmp_path, method, best):
    """Whether the best round is before the checkpoint or after it."""
    saved = ["save_personal=true", "strategy.local.lr=1.0"] if method == "fedper" else []
    asked = [*with_method(method, *QUICK), OWN, "checkpoint_every=2", *saved]
    whole = run(config_of(*asked, f"output_dir={tmp_path}/whole"))
    again = run(config_of(*asked, f"resume={tmp_path}/whole/checkpoints/000002", f"output_dir={tmp_path}/again"))
    assert again["best_round"] == whole["best_round"] == best
    personal = [f"personal-best/{client}.safetensors" for client in range(6)] if saved else []
    for name in ("metrics.csv", "clients.csv", "best.safetensors", *personal):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_held_out_clients_select_nothing(tmp_path):
    asked = (*with_method("fedper", *QUICK), OWN, "held_out_clients=2", f"output_dir={tmp_path}/run")
    summary = run(config_of(*asked))
    names = {row["metric"] for row in metrics(tmp_path / "run") if row["split"] == "validation"}
    assert {"accuracy", "held_out/accuracy"} <= names
    assert summary["best_round"] is not None


def test_a_client_without_validation_examples_reports_no_metric_and_counts_all_the_same(tmp_path):
    small = ("num_clients=60", "partition.alpha=0.1", "partition.validation_fraction=0.03", "metrics=[accuracy,macro_f1]")
    how = (*TINY_RUN, *small, "engine=local", "strategy=fedper", "num_rounds=1", "dataset.merge_splits=true")
    found = {}
    for size in (1, 60):
        found[size] = run(config_of(*how, f"engine.stack_size={size}", f"output_dir={tmp_path / str(size)}"))
        rows = read_rows(tmp_path / str(size) / "clients.csv")
        clients, checked = (
            {row["client"] for row in rows if row["metric"] == name} for name in ("accuracy", "validation_accuracy")
        )
        assert (len(clients), found[size]["replies_rejected"]) == (60, 0)
        assert 0 < len(checked) < 60
    assert found[1]["personal_accuracy_mean"] == pytest.approx(found[60]["personal_accuracy_mean"], abs=0.02)
