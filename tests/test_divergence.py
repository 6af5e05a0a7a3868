"""Non-finite losses or weights of a client: its reply is rejected, the client is named, and the run continues or stops."""

import json
import math
import subprocess
import sys

import pytest
import torch
from helpers import Schedule, Through, config_of, run_strategy, same, sized_workspace, slow
from messages import ROOT
from tiny import TINY_RUN

from contrafed.clients.fedper import FedPerClient
from contrafed.core.errors import RunStopped
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.run import run

DIVERGING_RUN = (*TINY_RUN, "engine=local", "strategy=fedavg", "participation=full", "strategy.local.lr=1e30")


class Diverging(FedPerClient):
    """Client 2 diverges in round 2: in its loss at step 1, or in its weights alone."""

    in_loss = True

    def local_update(self, stack):
        self.train(stack)
        if stack.server_round == 2 and 2 in stack.clients:
            row = stack.clients.index(2)
            if self.in_loss:
                self.losses[-1].tables["loss"][row, 1] = torch.inf
            else:
                stack.params["classifier.bias"].data[row, 0] = torch.nan
        return self.make_upload(stack)


class InWeights(Diverging):
    in_loss = False


def test_a_diverged_run_that_is_resumed_after_its_last_round_stays_one(tmp_path):
    how = ("checkpoint_every=1", "resume=latest", "engine.max_norm_ratio=null", f"output_dir={tmp_path}/run")
    config = config_of(*TINY_RUN, "engine=local", "strategy=fedavg", "participation=full", "strategy.local.lr=3e4", *how)
    for _ in range(2):
        summary = run(config, unique=False)
        assert (summary["status"], summary["rounds"]) == ("diverged", summary["num_rounds"])


def test_a_client_whose_own_model_alone_diverges_keeps_the_one_it_had():
    """Ditto's v diverges in the last step. No upload shows it, and every later loss would be NaN."""
    workspace = sized_workspace("ditto", [20, 24], local={"epochs": None, "iterations": 2})

    class Own(workspace.client_class):
        def local_update(self, stack):
            sent = super().local_update(stack)
            stack.state["own/classifier.bias"][0, 0] = torch.inf
            return sent

    workspace.client_class = Own
    client = Own(workspace, [0])
    (update,) = client.update([{f"model/{n}": v for n, v in workspace.initial.items()}], 1)
    assert update.diverged.endswith("its weights are not finite")
    assert all(value.isfinite().all() for value in update.tensors.values())


@pytest.mark.parametrize("stack_size", [1, 4])
@pytest.mark.parametrize("client_class", [Diverging, InWeights])
def test_a_client_that_diverges_is_named_and_keeps_what_it_remembered(client_class, stack_size):
    settings = config_of("strategy=fedper", "num_clients=4", "participation=full")
    workspace = sized_workspace("fedper", [20, 24, 28, 32], local={"epochs": None, "iterations": 3})
    workspace.client_class, rounds, client_states = client_class, [], []
    grid = LocalGrid(4, stack_size)

    def after(done):
        rounds.append(done)
        client_states.append(
            {k: dict(grid.client_states.get(FIRST_NODE_ID + k)) for k in range(4)} if done.server_round else {}
        )

    models, _ = run_strategy(
        workspace, settings, Schedule([range(4)] * 3), 3, stack_size=stack_size, grid=grid, may_fail=True, after_round=after
    )
    (said,) = rounds[2].failures
    loss = "loss inf" if client_class.in_loss else "loss "
    assert said.startswith(f"client 2, round 2, step {1 if client_class.in_loss else 2}, {loss}")
    assert said.endswith("" if client_class.in_loss else ": its weights are not finite")
    assert rounds[2].rejected == {"not finite": 1}
    assert rounds[2].diverged == [said]
    assert not any(done.diverged for number, done in enumerate(rounds) if number != 2)
    # It continues from its earlier state, and its replies are accepted again.
    assert same(client_states[2][2], client_states[1][2])
    assert not same(client_states[2][1], client_states[1][1])
    assert not same(client_states[3][2], client_states[2][2])
    assert rounds[3].rejected == {}
    assert all(bool(value.isfinite().all()) for model in models for value in model.values())


def test_a_run_goes_on_or_stops_with_everything_written(tmp_path, call_command, expect_error):
    summary = run(config_of(*DIVERGING_RUN, f"output_dir={tmp_path}/on"))
    assert (summary["status"], summary["rounds"], summary["replies_rejected"]) == ("finished", 3, 18)
    with expect_error("on_divergence", RunStopped):
        run(config_of(*DIVERGING_RUN, "on_divergence=stop", f"output_dir={tmp_path}/notebook"))
    done = call_command(*DIVERGING_RUN, "on_divergence=stop", f"output_dir={tmp_path}/off")
    assert done.returncode == 1
    assert done.stderr.startswith("error: on_divergence=stop: client 0, round 1, step ")
    assert len(done.stderr.splitlines()) == 1
    left = json.loads((tmp_path / "off" / "summary.json").read_text())
    assert (left["status"], left["rounds"]) == ("diverged", 1)
    assert (tmp_path / "off" / "model.safetensors").exists()
    # What was written of the rounds that there were is what the other run has of them.
    rows = (tmp_path / "off" / "metrics.csv").read_bytes()
    assert (tmp_path / "on" / "metrics.csv").read_bytes().startswith(rows)


def test_a_run_that_stopped_never_goes_on_behind_it(tmp_path, expect_error):
    """Its last checkpoint is of the round before. Otherwise a repeated sweep would take it for a finished run."""
    wanted = (*DIVERGING_RUN, "on_divergence=stop", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/run")
    for _ in range(2):
        with expect_error("on_divergence", RunStopped):
            run(config_of(*wanted))
    assert run(config_of(*wanted, "on_divergence=reject"))["status"] == "finished"


def test_a_run_whose_last_rounds_all_fail_is_finished_whether_it_was_stopped_or_not(tmp_path, monkeypatch):
    real = FedPerClient.local_update

    def fails(self, stack):
        if stack.server_round == 3:
            raise ValueError("a slip of its author's")
        return real(self, stack)

    monkeypatch.setattr(FedPerClient, "local_update", fails)
    wanted = ("strategy=fedper", *TINY_RUN, "engine=local", "participation=full", "checkpoint_every=2", "num_rounds=3")
    assert run(config_of(*wanted, f"output_dir={tmp_path}/whole"))["status"] == "finished"
    (tmp_path / "whole" / "summary.json").unlink()
    assert run(config_of(*wanted, "resume=latest", f"output_dir={tmp_path}/whole"))["status"] == "finished"


def test_clients_are_named_by_their_numbers_whoever_was_first():
    """Replies arrive in reverse order here. Flower's arrive when they are ready."""
    workspace, rounds = sized_workspace("fedavg", [20] * 3, local={"epochs": None, "iterations": 3, "lr": 1e200}), []
    settings = config_of("strategy=fedavg", "num_clients=3", "participation=full")
    how = {"wrap": lambda grid: Through(grid, lambda _, replies: replies[::-1]), "after_round": rounds.append}
    run_strategy(workspace, settings, Schedule([range(3)]), 1, may_fail=True, **how)
    assert [line.split(",")[0] for line in rounds[1].diverged] == ["client 0", "client 1", "client 2"]
    assert rounds[1].failures == rounds[1].diverged


def test_a_run_in_which_every_client_fails_is_no_finished_one(tmp_path, call_command, monkeypatch):
    """After its author has fixed it, the run starts with round 1 and has all its rounds."""

    def broken(self, stack):
        raise ValueError("a slip of its author's")

    overrides = ("strategy=fedper", *TINY_RUN, "engine=local", "participation=full", "checkpoint_every=2", "resume=latest")
    with monkeypatch.context() as patch:
        patch.setattr(FedPerClient, "local_update", broken)
        failed = call_command(*overrides, f"output_dir={tmp_path}/run")
    assert (failed.returncode, len(failed.stderr.splitlines())) == (1, 1)
    said = (
        "error: every client failed in every round; the first: client 0, round 1, step 0: ValueError: a slip of its author's ("
    )
    assert failed.stderr.startswith(said)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert call_command(*overrides, f"output_dir={tmp_path}/run").returncode == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["failures"], "resumed_from" in summary) == ("finished", 0, False)


def fail_at_one_line(self, stack):
    raise ValueError(f"a slip of its author's with client {stack.clients}")


def fail_at_two_lines(self, stack):
    if stack.server_round == 2:
        raise ValueError("a slip of its author's")
    raise ValueError("a slip of its author's")


def fail_once(self, stack):
    if stack.server_round == 1:
        raise ValueError("a slip of its author's")
    return LOCAL_WORK(self, stack)


LOCAL_WORK = FedPerClient.local_update
# Of eight rounds, those that begin.
MISTAKES = [(fail_at_one_line, 2), (fail_at_two_lines, 8), (fail_once, 8)]


@pytest.mark.parametrize(
    ("mistake", "rounds", "stack_size"),
    [*((*each, 1) for each in MISTAKES), (*MISTAKES[0], 3), *(slow(*each, 3) for each in MISTAKES[1:])],
)
def test_a_mistake_in_a_method_ends_the_run_after_two_rounds(tmp_path, call_command, monkeypatch, mistake, rounds, stack_size):
    """But not where anything else could be the cause."""
    monkeypatch.setattr(FedPerClient, "local_update", mistake)
    line = (
        "strategy=fedper", *TINY_RUN, "engine=local", f"engine.stack_size={stack_size}", "participation=full", "num_rounds=8",
    )  # fmt: skip
    found = call_command(*line, "eval_every=30", f"output_dir={tmp_path}/run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == rounds, found
    if rounds == 2:
        assert (found.returncode, summary["status"], len(found.stderr.splitlines())) == (1, "failed", 1)
        assert "test_divergence.py, line " in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ray", "flower"])
def test_engines_stop_alike(tmp_path, engine):
    """In separate processes that must end: one line, exit status 1, and all results written."""
    command = [sys.executable, "main.py", *DIVERGING_RUN, "on_divergence=stop"]
    said = {}
    for name in ("local", engine):
        wanted = [*command, f"engine={name}", f"output_dir={tmp_path}/{name}"]
        done = subprocess.run(wanted, cwd=ROOT, capture_output=True, text=True, timeout=900)
        assert done.returncode == 1
        said[name] = done.stderr, (tmp_path / name / "metrics.csv").read_bytes()
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("diverged", 1)
    assert said[engine] == said["local"]
    assert said[engine][0].startswith("error: on_divergence=stop: client 0, round 1, step ")


def test_flowers_own_interface_says_it_too():
    workspace = sized_workspace("fedper", [20], local={"epochs": None, "iterations": 3, "lr": 1e200})
    client = workspace.client_class(workspace, [0])
    _, _, metrics = client.fit(client.get_parameters({}), {"server-round": 1})
    assert not math.isfinite(metrics["loss"])
    assert client.diverged.startswith("step ")
    assert client.client_states == [{}]
