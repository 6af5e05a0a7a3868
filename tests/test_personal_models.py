"""Personal models: evaluated also by heads fitted at the end, saved, and evaluated again from the files."""

import json
import shutil
from functools import cache

import pytest
from helpers import config_of, read_rows, slow

import contrafed.client_app.app
from contrafed.client_app.files import write_personal
from contrafed.clients.fedavg import FedAvgClient
from contrafed.runs.run import run
from contrafed.training.base import Client
from contrafed.training.prototypes import class_counts

SAVED_RUN = (
    "engine=local", "num_clients=6", "num_rounds=2", "eval_every=1", "participation=uniform", "participation.select=2",
    "model=mlp", "model.hidden=[8]", "model.projection=[5]", "dataset.merge_splits=true",
)  # fmt: skip


@pytest.fixture(scope="module")
def finish_run(tmp_path_factory):
    """Return the folder and summary of a method's run whose clients saved their models, made once."""

    @cache
    def make_run(name):
        folder = tmp_path_factory.mktemp(name) / "run"
        epochs = ["strategy.head_epochs=3"] if name in ("mpfedcon", "fedrep") else []
        return folder, run(config_of(f"strategy={name}", *SAVED_RUN, *epochs, "save_personal=true", f"output_dir={folder}"))

    return make_run


@pytest.mark.parametrize("name", ["mpfedcon", slow("fedrep")])
def test_the_last_evaluation_refits_every_head_and_reports_it_by_itself(tmp_path, finish_run, name):
    """A client that never participated has a trained head only there, which no other number includes."""
    folder, refitted = finish_run(name)
    changes = ("strategy.head_epochs=3", "strategy.eval_head_refresh=false", f"output_dir={tmp_path}/run")
    plain = run(config_of(f"strategy={name}", *SAVED_RUN, *changes))
    assert refitted["status"] == plain["status"] == "finished"
    values = {
        (int(r["round"]), r["metric"]): float(r["value"]) for r in read_rows(folder / "metrics.csv") if r["scope"] == "personal"
    }
    assert [t for t, metric in values if metric == "refit/accuracy"] == [2]
    assert refitted["personal_refit_accuracy_mean"] == values[2, "refit/accuracy"] > values[2, "accuracy"] + 0.1
    assert refitted["personal_accuracy_last10_mean"] == pytest.approx((values[1, "accuracy"] + values[2, "accuracy"]) / 2)
    assert "personal_refit_accuracy_mean" not in plain
    for key in ("personal_accuracy_mean", "personal_accuracy_best", "personal_accuracy_last10_mean", "personal_accuracy_std"):
        assert refitted[key] == plain[key]


@pytest.mark.parametrize("name", ["mpfedcon", "fedproto", "fedcrl", "local"])
@pytest.mark.parametrize("engine", ["local", slow("ray")])
def test_saved_personal_models_score_what_they_scored(tmp_path, finish_run, name, engine):
    folder, first = finish_run(name)
    assert sorted(p.name for p in (folder / "personal").iterdir()) == [f"{n}.safetensors" for n in range(6)]
    again = run(config_of(f"evaluate_only={folder}", f"engine={engine}", f"output_dir={tmp_path}/again"))
    for key in ("personal_accuracy_mean", "personal_accuracy_std", "method"):
        assert again[key] == first[key]
    assert again["rounds"] == 0
    rows = [(path / "clients.csv").read_text().splitlines()[1:] for path in (folder, tmp_path / "again")]
    last = [row.split(",", 1)[1] for row in rows[0] if row.startswith("2,") and ",accuracy," in row]
    assert [row.split(",", 1)[1] for row in rows[1]] == last


def test_saving_changes_no_number_even_for_a_client_without_training_data(tmp_path):
    """Client 2 has a test part alone. It is evaluated and saved like the others, and its head is never fitted."""
    file = tmp_path / "clients.json"
    file.write_text(json.dumps({"train": [list(range(60)), list(range(60, 90)), []], "test": [[100, 101], [102], [103, 104]]}))
    part = ("num_clients=3", "partition=file", f"partition.path={file}", "participation=full")
    shape = [o for o in SAVED_RUN if not o.startswith(("participation", "num_clients"))]
    logs = []
    for save in (False, True):
        folder = tmp_path / str(save)
        run(
            config_of(
                "strategy=fedrep", "strategy.head_epochs=3", *shape, *part, f"save_personal={save}", f"output_dir={folder}"
            )
        )
        logs.append([(folder / name).read_bytes() for name in ("metrics.csv", "clients.csv")])
    assert logs[0] == logs[1]
    assert b"\n2,2,accuracy," in logs[0][1]
    again = run(config_of(f"evaluate_only={tmp_path}/True", "engine=local", f"output_dir={tmp_path}/again"))
    assert again["status"] == "finished"


def test_models_that_are_evaluated_by_what_a_client_adds_score_what_they_scored(tmp_path, monkeypatch):
    """Their clients' class counts, which ``eval_models`` adds to what they received, are saved with the models."""

    def eval_models(self, stack):
        stack.received["own/counts"] = class_counts(self.workspace, stack)
        return {"model": stack.params}

    def scores(self, features, received):
        return features.logits + received["own/counts"].log1p()

    for name, value in {"own_model": True, "eval_models": eval_models, "scores": scores}.items():
        monkeypatch.setattr(FedAvgClient, name, value)
    shape = ("strategy=fedavg", *SAVED_RUN, "save_personal=true", "partition.validation_fraction=0.2")
    first = run(config_of(*shape, f"output_dir={tmp_path}/run"))
    assert len(list((tmp_path / "run" / "personal-best").iterdir())) == 6
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))
    for key in ("personal_accuracy_mean", "personal_accuracy_std"):
        assert again[key] == first[key]
    monkeypatch.setattr(FedAvgClient, "scores", Client.scores)
    assert run(config_of(*shape, f"output_dir={tmp_path}/plain"))["personal_accuracy_mean"] != first["personal_accuracy_mean"]


def test_a_best_model_that_is_not_written_is_told_with_the_reason(tmp_path, monkeypatch, capsys):
    def write(folder, client, *tensors):
        if folder.endswith("-best"):
            raise RuntimeError(f"no room for {client}")
        write_personal(folder, client, *tensors)

    monkeypatch.setattr(contrafed.client_app.app, "write_personal", write)
    assert run(config_of("strategy=local", *SAVED_RUN, "save_personal=true", f"output_dir={tmp_path}/run"))["rounds"] == 2
    (line,) = {line for line in capsys.readouterr().out.splitlines() if "round 1" in line and "did not write" in line}
    assert "6 clients" in line
    assert "no room for 0" in line


def test_clients_that_never_train_have_saved_models_whether_or_not_they_were_scored(tmp_path):
    shape = (
        "strategy=fedrep", *SAVED_RUN, "held_out_clients=2", "eval_clients=false", "save_personal=true",
        f"output_dir={tmp_path}/run",
    )  # fmt: skip
    assert "personal_accuracy_mean" not in run(config_of(*shape))
    assert len(list((tmp_path / "run" / "personal").iterdir())) == 6
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", "eval_clients=true", f"output_dir={tmp_path}/again"))
    assert again["personal_accuracy_mean"] > 0
    assert again["personal_held_out_accuracy_mean"] > 0


@pytest.mark.parametrize("attack", ["sign_flip", "label_flip"])
def test_attackers_stay_apart_if_saved_models_are_scored(tmp_path, attack):
    attacked = (f"attack={attack}", "attack.clients=[1,4]", "eval_train=true", "save_personal=true")
    first = run(config_of("strategy=fedper", *SAVED_RUN, *attacked, f"output_dir={tmp_path}/run"))
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))
    assert again["attackers"] == first["attackers"] == [1, 4]
    rows = (read_rows(tmp_path / name / "metrics.csv") for name in ("run", "again"))
    before, after = ([row | {"round": ""} for row in found if row["scope"] == "personal"] for found in rows)
    assert {"accuracy", "attackers/accuracy"} < {row["metric"] for row in after}
    assert before[-len(after) :] == after


def test_models_without_files_are_refused_also_if_clients_have_only_validation_examples(tmp_path, expect_error):
    shape = ("strategy=fedper", *SAVED_RUN, "dataset.merge_splits=false", "partition.validation_fraction=0.3")
    run(config_of(*shape, f"output_dir={tmp_path}/run"))
    with expect_error():
        run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))


def test_a_saved_global_model_scores_what_it_scored(tmp_path):
    first = run(config_of("strategy=fedavg", *SAVED_RUN, "dataset.merge_splits=false", f"output_dir={tmp_path}/run"))
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))
    assert again["accuracy_final"] == first["accuracy_final"]


def test_mistakes_about_saved_models_are_one_line(tmp_path, finish_run, expect_error):
    with expect_error("evaluate_only"):
        run(config_of("evaluate_only=nowhere"))
    with expect_error("evaluate_only"):
        config_of("evaluate_only=nowhere", "seed=1", "strategy.local.lr=1", "engine=local")
    shutil.copytree(finish_run("fedcrl")[0], tmp_path / "bare", ignore=shutil.ignore_patterns("personal"))
    with expect_error():
        run(config_of(f"evaluate_only={tmp_path}/bare", "engine=local", f"output_dir={tmp_path}/again"))


def test_models_of_clients_without_test_examples_are_refused_with_the_run_to_repeat(tmp_path, expect_error):
    shape = ("strategy=fedcrl", *SAVED_RUN, "dataset.merge_splits=false", "save_personal=true")
    run(config_of(*shape, f"output_dir={tmp_path}/run"))
    for more in ((), ("eval_clients=true",), ("eval_clients=false",)):
        with expect_error("evaluate_only"):
            run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again", *more))
        assert not (tmp_path / "again").exists()


def test_models_are_scored_as_their_run_scored_unless_the_command_line_says_otherwise(tmp_path):
    (tmp_path / "config.yaml").write_text("eval_train: true\nmetrics: [accuracy, macro_f1]\nnum_clients: 3\n")
    config = config_of(f"evaluate_only={tmp_path}")
    assert (config["eval_train"], config["metrics"], config["eval_clients"]) == (True, ["accuracy", "macro_f1"], None)
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "config.yaml").write_text("eval_clients: false\n")  # and save_personal=true
    assert config_of(f"evaluate_only={tmp_path}/no")["eval_clients"] is None
    config = config_of(f"evaluate_only={tmp_path}", "eval_train=false", "metrics=[accuracy]")
    assert (config["eval_train"], config["metrics"]) == (False, ["accuracy"])
