"""Clients that never train are evaluated and reported separately, and do not enter the others' numbers."""

import numpy as np
import pandas as pd
import pytest
from helpers import close, config_of, read_rows
from reported import write_run
from safetensors.torch import load_file
from tiny import TINY_RUN

from contrafed import run
from contrafed.report.client_rows import select_rows
from contrafed.report.runs import read
from contrafed.server.round_log import Population
from contrafed.server.scores import Score, summaries

FULL_RUN = (*TINY_RUN, "engine=local", "participation=full", "held_out_clients=2", "num_rounds=2")


def column(folder, name, wanted):
    return [row[wanted] for row in read_rows(f"{folder}/{name}.csv")]


def values(folder):
    return {
        (int(r["round"]), r["scope"], r["split"], r["metric"]): float(r["value"]) for r in read_rows(f"{folder}/metrics.csv")
    }


def population(held_out=0, attackers=(), clients=4):
    return Population(np.ones(clients), np.arange(clients), held_out, attackers=attackers)


def test_scores_by_hand():
    scores = [Score(client, n, {"": {"accuracy": a, "loss": 1.0}}) for client, n, a in ((0, 1, 0.5), (1, 3, 0.9), (2, 2, 0.1))]
    found = summaries(scores, population(1, clients=3))
    assert found["accuracy"] == pytest.approx(0.8)
    assert found["accuracy_mean"] == pytest.approx(0.7)
    assert found["held_out/accuracy"] == pytest.approx(0.1)
    assert summaries(scores, population(clients=3)).keys() == {name for name in found if not name.startswith("held_out/")}
    assert summaries(scores, population(3, clients=3)).keys() == {name for name in found if name.startswith("held_out/")}


@pytest.mark.parametrize(("method", "place"), [("fedavg", ("global", "clients")), ("fedper", ("personal", "test"))])
def test_they_are_evaluated_but_never_train(method, place, tmp_path):
    summary = run(config_of(*FULL_RUN, f"strategy={method}", f"output_dir={tmp_path / 'a'}", "dataset.merge_splits=true"))
    folder = summary["folder"]
    assert set(column(folder, "participants", "client")) == {"0", "1", "2", "3"}
    found = values(folder)
    last = {
        int(r["client"]): float(r["value"])
        for r in read_rows(f"{folder}/clients.csv")
        if r["round"] == "2" and r["metric"] == "accuracy"
    }
    assert set(last) == set(range(6))
    assert found[2, *place, "held_out/accuracy_mean"] == pytest.approx(np.mean([last[4], last[5]]))
    assert found[2, *place, "accuracy_mean"] == pytest.approx(np.mean([last[client] for client in range(4)]))
    key = "held_out_accuracy" if method == "fedavg" else "personal_held_out_accuracy_mean"
    assert summary[key] == pytest.approx(found[2, *place, "held_out/accuracy"])
    if method == "fedavg":  # the union of the test parts of those that train
        assert found[2, "global", "test", "accuracy"] == pytest.approx(found[2, "global", "clients", "accuracy"])


def test_after_local_work_they_are_evaluated_too(tmp_path):
    """A strategy with a model for each client has none for those that never train, so they start at W."""
    after = ("dataset.merge_splits=true", "evaluate_after=local_training")
    for method in ("fedawe", "fedamp"):
        summary = run(config_of(*FULL_RUN, *after, f"strategy={method}", f"output_dir={tmp_path / method}"))
        assert 0 <= values(summary["folder"])[2, "personal", "test", "held_out/accuracy_mean"] <= 1


def test_a_personal_part_that_never_trained_is_the_initial_one(tmp_path):
    summary = run(config_of(*FULL_RUN, "strategy=fedper", "save_personal=true", f"output_dir={tmp_path / 'a'}"))
    models = [load_file(f"{summary['folder']}/personal/{client}.safetensors") for client in range(6)]
    for name in models[0]:
        assert models[4][name].equal(models[5][name])
        assert models[0][name].equal(models[4][name]) == name.startswith("model/encoder")


def test_the_others_train_as_if_they_were_alone(tmp_path):
    """Participation is drawn over the clients that may train. Fractions and strategies count no others."""
    drawn = ("strategy=fedau", "participation=uniform", "participation.select=0.5", "partition=iid")
    summary = run(config_of(*TINY_RUN, "engine=local", *drawn, "held_out_clients=2", f"output_dir={tmp_path / 'a'}"))
    alone = run(config_of(*TINY_RUN, "engine=local", *drawn, "num_clients=4", f"output_dir={tmp_path / 'b'}"))
    assert column(summary["folder"], "participants", "client") == column(alone["folder"], "participants", "client")
    assert len(column(summary["folder"], "participants", "client")) == 2 * 3


def test_a_rule_counts_only_those_that_may_train(tmp_path):
    """FedAU's first round divides by K, the number of all clients. Under full participation it is the participants' mean."""
    models = []
    for method in ("fedau", "fedavg"):
        once = (*FULL_RUN, f"strategy={method}", "strategy.weights=uniform", "num_rounds=1", f"output_dir={tmp_path / method}")
        models.append(load_file(f"{run(config_of(*once))['folder']}/model.safetensors"))
    close(*models, tolerance=1e-6)


def test_clients_that_are_held_out_are_not_among_those_that_train(tmp_path):
    rows = [(10, client, "accuracy", value) for client, value in enumerate((0.5, 1.0, 0.0, 0.0))]
    found = read(write_run(tmp_path / "a", clients=rows, held_out_clients=2), "a")
    assert found.last_of_clients("accuracy") == {0: 0.5, 1: 1.0}
    assert found.mean_over_clients("accuracy") == [(10, 0.75)]


def test_scores_of_attackers_are_apart(tmp_path):
    scores = [Score(client, 1, {"": {"accuracy": a, "loss": 1.0}}) for client, a in enumerate((0.5, 0.9, 0.1, 0.3))]
    found = summaries(scores, population(held_out=1, attackers=(2,)))
    assert found["accuracy"] == pytest.approx(0.7)
    assert (found["attackers/accuracy"], found["held_out/accuracy"]) == (0.1, 0.3)
    attacked = (*TINY_RUN, "engine=local", "num_rounds=1", "participation=full", "dataset.merge_splits=true", "strategy=fedper")
    run(config_of(*attacked, "attack=label_flip", "attack.clients=[1]", f"output_dir={tmp_path / 'a'}"))
    done = read(tmp_path / "a", "a")
    last = {int(r["client"]): float(r["value"]) for r in read_rows(tmp_path / "a/clients.csv") if r["metric"] == "accuracy"}
    assert done.points("personal", "test", "attackers/accuracy") == [(1, pytest.approx(last.pop(1)))]
    assert done.points("personal", "test", "accuracy_mean") == [(1, pytest.approx(np.mean([*last.values()])))]
    assert done.last_of_clients("accuracy").keys() == last.keys()
    assert "personal_attackers_accuracy_mean" in done.summary
    rows = done.clients[done.clients["client"] == 1]
    attack = {"fraction": 0.5, "clients": [1]}
    assert select_rows(rows, {"num_clients": 6, "seed": 0, "attack": attack}, "accuracy").empty
    assert len(select_rows(rows, {"num_clients": 2, "seed": 0, "attack": attack | {"clients": [0, 1]}}, "accuracy")) > 0


def test_classes_on_held_out_clients_alone_are_told(tmp_path, capsys):
    held_out = (*TINY_RUN, "engine=local", "num_rounds=1", "dataset.merge_splits=true", "held_out_clients=2")
    for partition, told in (("pathological", 1), ("iid", 0)):
        run(config_of(*held_out, f"partition={partition}", f"output_dir={tmp_path / partition}"))
        assert sum(line.startswith("held_out_clients: ") for line in capsys.readouterr().out.splitlines()) == told


def test_reports_take_the_attackers_that_the_summary_names():
    rows = pd.DataFrame({"round": 1, "client": range(4), "metric": "accuracy", "value": 0.5})
    config = {"num_clients": 5, "held_out_clients": 1, "seed": 0, "attack": {"name": "ipm", "fraction": 0.5, "clients": None}}
    drawn = select_rows(rows, config, "accuracy")["client"].tolist()
    assert len(drawn) == 2
    named = [client for client in range(4) if client not in drawn][:1]
    assert select_rows(rows, config, "accuracy", named)["client"].tolist() == [k for k in range(4) if k not in named]
