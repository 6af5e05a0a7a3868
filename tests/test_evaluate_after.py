"""The evaluated models: those that clients received, or those after the next round's local training
(evaluate_after=local_training).
"""

import pytest
import torch
from helpers import config_of, read_rows, workspace_of

from contrafed import compose, run

OWN_TEST_PARTS = (
    "dataset.merge_splits=true", "num_clients=4", "model=mlp", "model.hidden=[16]", "partition.min_client_size=12",
)  # fmt: skip


def client_of(name, client_states=None):
    workspace = workspace_of(config_of(f"strategy={name}", *OWN_TEST_PARTS), dtype=torch.float64)
    client = workspace.client_class(workspace, [1], client_states)
    down, _ = client.message_spec(client.model, client.config)
    start = {f"model/{n}": v for n, v in workspace.initial.items()}
    return client, {n: start.get(n, torch.zeros(s, dtype=torch.float64)).detach() for n, s in down.items()}


def test_after_its_local_work_a_client_is_evaluated_by_what_it_would_send():
    client, received = client_of("fedavg")
    (trained,) = client.update([received], 4)
    sent = {n.removeprefix("model/"): v for n, v in trained.tensors.items()}
    (after,) = client.evaluate_clients([received], 3, after_training=True)
    (given,) = client.evaluate_clients([received], 3, models=[sent])
    (before,) = client.evaluate_clients([received], 3)
    assert after.metrics == given.metrics
    assert after.metrics["loss"] < before.metrics["loss"]


@pytest.mark.parametrize("name", ["fedrep", "fedcrl", "moon"])
def test_what_is_evaluated_after_local_work_leaves_no_trace(name):
    client, received = client_of(name)
    (first,) = client.update([received], 1)
    client.client_states = [first.client_state]
    kept = {n: v.clone() for n, v in first.client_state.items()}
    (after,) = client.evaluate_clients([received], 1, after_training=True)
    assert all(torch.equal(v, kept[n]) for n, v in client.client_states[0].items())
    (again,) = client.update([received], 2)
    other, _ = client_of(name, [kept])
    (same,) = other.update([received], 2)
    assert all(torch.equal(v, same.tensors[n]) for n, v in again.tensors.items())
    own = again.client_state if name == "fedcrl" else again.tensors
    for n, value in after.model.items():
        kept_as = {f"model/{n}", f"personal/{n}", f"own/{n}"} & (own.keys() | again.client_state.keys())
        assert any(torch.equal(value, (own | again.client_state)[key]) for key in kept_as)


@pytest.mark.parametrize("asked", ["fedavg", *(f"{name} strategy.local.epochs=1" for name in ("moon", "fedproc"))])
def test_a_lone_clients_is_the_global_model_of_the_next_round(asked, tmp_path):
    """Its batches, its learning rate, and the server's broadcast are those of the next round."""
    one = (
        *f"strategy={asked}".split(), *OWN_TEST_PARTS[2:4], "dataset.merge_splits=true", "num_clients=1", "partition=iid",
        "participation=full",
    )  # fmt: skip
    found = {}
    for evaluate in ("download", "local_training"):
        own = (
            f"evaluate_after={evaluate}", f"output_dir={tmp_path / evaluate}", "num_rounds=4", "eval_every=1",
            "eval_clients=true",
        )  # fmt: skip
        run(compose(*one, *own, "strategy.local.lr_decay=0.5", "engine=local"))
        rows = [
            row
            for row in read_rows(tmp_path / evaluate / "metrics.csv")
            if row["metric"] == "loss" and row["split"] in ("clients", "test")
        ]
        scope = ("global", "clients") if evaluate == "download" else ("personal", "test")
        found[evaluate] = [float(row["value"]) for row in rows if (row["scope"], row["split"]) == scope]
    assert len(found["download"]) == 5
    assert found["local_training"][:-1] == pytest.approx(found["download"][1:], rel=1e-6)


def test_a_run_reports_it_as_personal_beside_the_global_score(tmp_path):
    settings = (
        "strategy=fedavg", *OWN_TEST_PARTS, "engine=local", "num_rounds=2", "participation=full",
        "evaluate_after=local_training",
    )  # fmt: skip
    summary = run(compose(*settings, "save_personal=true", f"output_dir={tmp_path / 'a'}"))
    scopes = {(row["scope"], row["split"]) for row in read_rows(tmp_path / "a" / "metrics.csv")}
    assert {("personal", "test"), ("global", "test")} <= scopes
    assert len(list((tmp_path / "a" / "personal").iterdir())) == 4
    assert summary["num_rounds"] == 2


def test_where_no_client_has_a_test_part_it_is_refused(tmp_path, expect_error):
    few = ("strategy=fedavg", "num_clients=4", "model=mlp", "engine=local", "num_rounds=1", f"output_dir={tmp_path / 'a'}")
    with expect_error("evaluate_after"):
        run(compose(*few, "evaluate_after=local_training"))
