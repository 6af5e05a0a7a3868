"""Deadlines and over-selection: what becomes of late clients, by hand, in a stack, after a resume and in the engines."""

import json
from functools import partial

import numpy as np
import pytest
from helpers import (
    Scalar,
    build_received,
    close,
    config_of,
    read_rows,
    run_strategy,
    scalar_settings,
    scalar_workspace,
    sized_workspace,
    slow,
)  # fmt: skip
from tiny import TINY_RUN

from contrafed.core.client_run import choose, client_run_of
from contrafed.data.clock import Clock, Speeds
from contrafed.data.participation import make_participation, read_deadline
from contrafed.runs.run import run
from contrafed.strategies.fedavg import FedAvg
from contrafed.training.workspace import client_class_of

START, TARGETS = 2.0, (0, 6, 3)


class Three(Clock):
    """Three clients with 1, 1 and 4 seconds a step. A message of one number takes a second. Two steps take 4, 4 and 10 s."""

    def speeds(self, clients, server_round):
        return Speeds(np.array([1.0, 1.0, 4.0])[clients], np.full(len(clients), 4.0), np.full(len(clients), 4.0))


def move(w, target, steps=2):
    """Return w after steps of rate 0.1 on (w - target)^2 / 2."""
    return target + 0.9**steps * (w - target)


def run_by_hand(rounds, **participation):
    """Return W after each round, and each round's log of simulated time."""
    settings = scalar_settings(targets=TARGETS)
    pattern = choose("participation", config_of("participation=full")["participation"] | participation)
    there, seen = make_participation(pattern, lambda: None, 3, 0), []
    how = {
        "rule": partial(FedAvg, clock=Three(None, 3, 0), num_local_steps=lambda examples: 2),
        "after_round": lambda done: seen.append(done),
    }
    models, _ = run_strategy(scalar_workspace(settings, Scalar(START), TARGETS), settings, there, rounds, **how)
    for done in seen[1:]:  # sums of clients.csv are those of metrics.csv. Uploads of this workspace are in double precision
        of_clients = {name: values.sum() for name, (_, values) in done.client_metrics.items()}
        assert (of_clients["bytes_down"], 2 * of_clients["bytes_up"]) == (done.bytes_down, done.bytes_up)
    return [float(model["classifier.w"]) for model in models[1:]], seen[1:]


FAST = (move(START, 0) + move(START, 6)) / 2  # without client 2


@pytest.mark.parametrize(
    ("how", "model", "seconds", "lost"),
    [
        ({}, (2 * FAST + move(START, 3)) / 3, 10, None),
        ({"deadline": 6}, FAST, 6, (1, 1, 6)),  # after its download client 2 takes one step of four seconds
        ({"deadline": "q0.6"}, FAST, 4, (1, 0, 4)),
        ({"deadline": "q0.7"}, (2 * FAST + move(START, 3)) / 3, 10, (0, 0, 0)),
        ({"deadline": 6, "late": "partial"}, (2 * FAST + move(START, 3, 1)) / 3, 6, (1, 0, 0)),
        ({"deadline": 5, "late": "partial"}, FAST, 5, (1, 1, 5)),  # no step leaves time for the upload
        ({"deadline": 3}, START, 3, (3, 4, 9)),
    ],
)
def test_a_deadline_by_hand(how, model, seconds, lost):
    models, (done,) = run_by_hand(1, **how)
    assert models == [pytest.approx(model, abs=1e-12)]
    assert (done.simulated["simulated_seconds"], done.simulated["simulated_time"]) == (seconds, seconds)
    assert tuple(done.simulated.get(name) for name in ("late", "lost_steps", "lost_seconds")) == (lost or (None,) * 3)
    assert done.bytes_down == 3 * 4


@pytest.mark.parametrize(("a", "weight"), [(0.0, 1), (2.0, 1 / 4)])
def test_a_stale_reply_moves_the_model_of_the_round_in_which_it_arrives(a, weight):
    """Client 2 starts at 0 s and arrives at 10 s, when the second round ends. It starts again in the third."""
    models, done = run_by_hand(3, deadline=6, late="stale", staleness_a=a)
    second = (move(FAST, 0) + move(FAST, 6) + FAST + weight * (move(START, 3) - START)) / 3
    assert models == pytest.approx([FAST, second, (move(second, 0) + move(second, 6)) / 2], abs=1e-12)
    assert [each.participants.tolist() for each in done] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert [each.simulated["simulated_time"] for each in done] == [6, 10, 16]
    assert [each.simulated["stale"] for each in done] == [0, 1, 0]
    assert [each.simulated["lost_steps"] for each in done] == [0, 0, 0]


def test_the_server_waits_for_as_many_replies_as_it_wants():
    pattern = choose("participation", config_of("participation=uniform")["participation"] | {"select": 2, "over_select": 1.3})
    assert len(make_participation(pattern, lambda: None, 9, 0).participants(1)) == 3
    models, (done,) = run_by_hand(1, select=2, over_select=1.5)
    assert models == [pytest.approx(FAST, abs=1e-12)]
    assert done.simulated == {"simulated_seconds": 4, "simulated_time": 4, "late": 1, "lost_steps": 0, "lost_seconds": 4}
    steps, seconds = done.client_metrics["steps"], done.client_metrics["simulated_seconds"]
    assert (steps[0].tolist(), steps[1].tolist(), seconds[1].tolist()) == ([0, 1, 2], [2, 2, 0], [4, 4, 4])
    assert done.client_metrics["bytes_up"][1].tolist() == [4, 4, 0]


@pytest.mark.parametrize("name", ["fedavg", "pmfl", "ditto", "fedrep", "pfedme", slow("fedala"), slow("mpfedcon")])
def test_clients_that_stop_early_are_the_same_alone_and_in_a_stack(name):
    limits = [5, 1, None, 3]
    workspace = sized_workspace(name, [20, 33, 14, 41], local={"batch_size": 8, "epochs": 2, "iterations": None})
    received, kind = build_received(workspace), workspace.client_class
    stack = kind(workspace, range(4))
    stack.max_steps = limits
    taken = np.zeros(4)
    for client, one in enumerate(stack.update([received] * 4, 1)):
        alone = kind(workspace, [client])
        alone.max_steps = limits[client : client + 1]
        (own,) = alone.update([received], 1)
        close(one.tensors, own.tensors)
        close(one.client_state, own.client_state)
        taken[client] = sum(losses.steps[0] for losses in alone.losses)
    inner = workspace.config.inner_steps if name == "pfedme" else 1
    assert taken[[0, 1, 3]].tolist() == [limit // inner * inner for limit in (5, 1, 3)]
    assert taken[2] > 3


TINY = ("strategy=fedavg", "model=mlp", "num_clients=6", "num_rounds=4", "eval_every=2", "engine=local", "tracker=none",
        "participation=uniform", "participation.select=3")  # fmt: skip
SLOW_CLIENTS = ("clock=lognormal", "clock.step_sigma=1.5", "participation.over_select=1.7")
FILES = ("metrics.csv", "clients.csv", "participants.csv", "model.safetensors")


def run_tiny(folder, *overrides):
    run(config_of(*TINY, *overrides, f"output_dir={folder}"))
    return [(folder / name).read_bytes() for name in FILES]


def test_a_resumed_run_has_the_late_replies_and_the_time(tmp_path):
    late = (*SLOW_CLIENTS, "participation.late=stale", "checkpoint_every=1")
    whole = run_tiny(tmp_path / "whole", *late)
    waited = [row["value"] for row in read_rows(tmp_path / "whole" / "metrics.csv") if row["metric"] == "stale"]
    assert sum(map(int, waited[2:])) > 0
    first = next((tmp_path / "whole" / "checkpoints").glob("*3"))
    assert run_tiny(tmp_path / "again", *late, f"resume={first}") == whole


@pytest.mark.parametrize("how", [{}, {"early_stop": 1, "eval_every": 1, "strategy.local.lr": 1e-9}])
def test_work_that_arrives_after_the_last_round_is_lost(tmp_path, how):
    run_tiny(tmp_path, *SLOW_CLIENTS, "participation.late=stale", *(f"{key}={value}" for key, value in how.items()))
    metrics, clients = (read_rows(tmp_path / f"{name}.csv") for name in ("metrics", "clients"))
    ends = {int(row["round"]): float(row["value"]) for row in metrics if row["metric"] == "simulated_time"}
    starts, steps = {t + 1: end for t, end in ends.items()}, {}
    for row in clients:
        if row["metric"] == "steps":
            steps[row["round"], row["client"]] = int(row["value"])
    late = {
        (row["round"], row["client"]): float(row["value"])
        for row in clients
        if row["metric"] == "simulated_seconds"
        and starts.get(int(row["round"]), 0.0) + float(row["value"]) > ends[max(ends)] + 1e-9
    }
    assert late
    assert (max(ends) < 4) == bool(how)
    lost = {name: [float(r["value"]) for r in metrics if r["metric"] == name] for name in ("lost_steps", "lost_seconds")}
    assert lost["lost_steps"] == [0] * (len(ends) - 1) + [sum(steps[key] for key in late)]
    assert lost["lost_seconds"][-1] == pytest.approx(sum(late.values()))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["lost_steps"], summary["lost_seconds"]) == (lost["lost_steps"][-1], lost["lost_seconds"][-1])


def test_a_deadline_that_nobody_meets_is_said(tmp_path, capsys):
    run_tiny(tmp_path, "clock=lognormal", "participation.deadline=1e-6", "num_rounds=1")
    assert "no reply was accepted in any round: the global model is the initial one" in capsys.readouterr().out.splitlines()


def test_no_clock_leaves_no_trace(tmp_path):
    """A clock alone adds rows. Without them the files are those of a run without it."""
    with_clock, without = run_tiny(tmp_path / "a", "clock=lognormal"), run_tiny(tmp_path / "b")
    assert with_clock[2:] == without[2:]
    added = ("simulated_seconds", "simulated_time", "steps", "bytes_down", "bytes_up")
    for name, old, new in zip(FILES, without[:2], with_clock[:2], strict=False):
        gone = added[:2] if name == "metrics.csv" else added
        lines = new.decode().splitlines(True)
        assert "".join(line for line in lines if line.split(",")[-2] not in gone) == old.decode()


def test_shares_of_a_deadline():
    assert [read_deadline(text)[1] for text in ("q0.8", "q.5", "q1")] == [0.8, 0.5, 1]
    assert read_deadline(None) == (np.inf, None)


@pytest.mark.parametrize("method", ["fedpac", "mpfedcon"])
def test_losses_of_a_phase_are_of_the_clients_that_came_to_it(tmp_path, method, monkeypatch):
    """A client without a step of a phase has no loss of it, alone and in a stack. An own method may allow this."""
    monkeypatch.setattr(client_class_of(client_run_of(config_of(f"strategy={method}")).strategy), "whole_training_reason", "")
    asked = (
        *TINY_RUN, "engine=local", "num_rounds=2", "participation=full", f"strategy={method}", "strategy.local.iterations=3",
        "strategy.local.epochs=null", "clock=lognormal", "clock.step_sigma=1.0", "participation.deadline=q0.5",
        "participation.late=partial",
    )  # fmt: skip
    found = []
    for size in (1, 6):
        run(config_of(*asked, f"engine.stack_size={size}", f"output_dir={tmp_path}/{size}"))
        rows = read_rows(tmp_path / str(size) / "metrics.csv")
        found.append(
            {(row["round"], row["scope"], row["metric"]): float(row["value"]) for row in rows if row["split"] == "fit"}
        )
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 2
    assert list(found[0].values()) == pytest.approx(list(found[1].values()), rel=1e-4)
