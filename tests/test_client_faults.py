"""Replies that are empty, doubled, late or of another round, clients that all fail, and long silence.

Other invalid replies are in test_grid.py and test_devices.py. Two exact steps of 0.1 from w towards a = (0, 6, 3).
"""

import json
from itertools import count

import pytest
import torch
from flwr.app import Error, Message, RecordDict
from helpers import Scalar, Schedule, Through, config_of, run_strategy, scalar_settings, scalar_workspace, slow
from tiny import TINY_RUN, run_tiny

from contrafed.core import codec
from contrafed.core.errors import RunStopped
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs import checkpoint
from contrafed.runs.run import run
from contrafed.server.norm_limit import MAX_KEPT, NormLimit
from contrafed.server.replies import Reply
from contrafed.training.base import Client

ALL_CLIENTS = [0, 1, 2]


def rounds_of(schedule, change=lambda server_round, replies: replies, name="fedavg", **settings):
    """Return W after each round of the scalar problem, each round's rejected replies, and the grid."""
    config, grid, rejected, rounds = scalar_settings(name, weights="uniform", **settings), LocalGrid(3, 1), [], count(1)
    models, _ = run_strategy(
        scalar_workspace(config, Scalar(2.0)), config, Schedule(schedule), len(schedule), grid=grid, may_fail=True,
        wrap=lambda grid: Through(grid, lambda _, replies: change(next(rounds), replies)),
        after_round=lambda done: rejected.append(dict(done.rejected)),
    )  # fmt: skip
    return [float(model["classifier.w"]) for model in models[1:]], rejected[1:], grid


def with_tensors(reply, tensors):
    content = RecordDict({**reply.content, codec.ARRAYS: codec.to_record(tensors)})
    return Message(content=content, metadata=reply.metadata)


def refuse_reply(reply):
    return Message(error=Error(0, "no"), metadata=reply.metadata)


def test_a_doubled_reply_counts_once():
    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, lambda server_round, replies: [*replies, replies[1], replies[1]])
    assert found == rounds_of([ALL_CLIENTS] * 2)[0]
    assert rejected == [{"not asked for": 2}] * 2


def test_a_late_reply_counts_in_no_round():
    """Client 1's reply to round 1 comes with those to round 2."""
    late = []

    def change(server_round, replies):
        late.extend(replies[1:2] if server_round == 1 else ())
        return [replies[0], replies[2]] if server_round == 1 else [*late, *replies]

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, change)
    assert found == rounds_of([[0, 2], ALL_CLIENTS])[0]
    assert rejected == [{"no answer": 1}, {"not asked for": 1}]


def test_a_reply_to_another_round_in_place_of_its_own_is_none():
    old = []

    def change(server_round, replies):
        old.extend(replies[1:2] if server_round == 1 else ())
        return [replies[0], old[0], replies[2]] if server_round == 2 else replies

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, change)
    assert found == rounds_of([ALL_CLIENTS, [0, 2]])[0]
    assert rejected == [{}, {"not asked for": 1, "no answer": 1}]


@pytest.mark.parametrize("name", ["fedavg", "fedau", "fedvarp", "pmfl"])
def test_rounds_in_which_all_clients_fail_are_rounds_without_replies(name):
    def change(server_round, replies):
        return [refuse_reply(reply) for reply in replies] if server_round in (2, 3) else replies

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 4, change, server=name)
    assert found == rounds_of([ALL_CLIENTS, [], [], ALL_CLIENTS], server=name)[0]
    assert rejected == [{}, {"failed": 3}, {"failed": 3}, {}]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon"])
def test_long_silence_changes_nothing_and_clients_go_on_with_what_they_remember(name):
    found, rejected, grid = rounds_of([ALL_CLIENTS, *[[]] * 60, ALL_CLIENTS], name=name)
    assert found[0] == found[60]
    assert found[61] != found[60]
    assert not any(rejected)
    before = rounds_of([ALL_CLIENTS], name=name)[2]
    silent = rounds_of([ALL_CLIENTS, *[[]] * 60], name=name)[2]
    for client in range(FIRST_NODE_ID, FIRST_NODE_ID + 3):
        assert {n: v.tolist() for n, v in silent.client_states.get(client).items()} == {
            n: v.tolist() for n, v in before.client_states.get(client).items()
        }


def replies(*norms, received=1.0):
    return [Reply(client, {}, 1, {}, {"model/w": torch.tensor([received])}, norm) for client, norm in enumerate(norms)]


@pytest.mark.parametrize("group", ["model", "delta"])
def test_counters_are_in_no_norm(group):
    counter = "encoder.norm.num_batches_tracked"
    limit = NormLimit(10, {counter})
    received = {"model/w": torch.ones(1), f"model/{counter}": torch.tensor(20000.0)}
    sizes = (1.0, 1.0, 1.0, 14000.0)
    found = [Reply(k, {f"{group}/w": torch.tensor([size])}, 1, {}, received, size) for k, size in enumerate(sizes)]
    assert [reply.client for reply in limit.accept(found)[1]] == [3]


def list_rejected(limit, *norms, **how):
    return [reply.norm for reply in limit.accept(replies(*norms, **how))[1]]


def test_the_first_rounds_go_by_the_cohorts_own_median():
    assert list_rejected(NormLimit(10), 1.0, 2.0, 3.0, 3e38) == [3e38]
    assert list_rejected(NormLimit(10), 3e38) == []  # nothing to compare it with


def test_later_rounds_go_by_recent_accepted_replies():
    limit = NormLimit(10)
    assert list_rejected(limit, 2.0, 2.0, 2.0) == []
    assert list_rejected(limit, 3e38, 3e38, 3e38) == [3e38] * 3
    assert list_rejected(limit, 21.0) == [21.0]
    assert list_rejected(limit, 19.0) == []
    for _ in range(MAX_KEPT):
        limit.accept(replies(1.0))
    assert limit.recent == [1.0] * MAX_KEPT


def test_an_upload_no_longer_than_what_was_received_passes():
    limit = NormLimit(10)
    limit.accept(replies(1e-9, 1e-9, 1e-9))
    assert list_rejected(limit, 1.0, 1.1) == [1.1]


def test_a_median_of_zero_is_no_limit():
    assert list_rejected(NormLimit(10), 0.0, 0.0, 5.0) == []


def send_huge(monkeypatch, value=3e37, client=1, first=1):
    """Have one client upload huge numbers from a round on."""
    original = Client.update

    def update(self, received, server_round, *args):
        updates = original(self, received, server_round, *args)
        for one, found in zip(self.clients, updates, strict=True):
            if one == client and server_round >= first:
                found.tensors = {name: torch.full_like(tensor, value) for name, tensor in found.tensors.items()}
        return updates

    monkeypatch.setattr(Client, "update", update)


LOCAL = ("engine=local", "tracker=none")


@pytest.mark.parametrize("method", [slow("fedavg"), "scaffold", slow("fedproto"), "fedcrl", slow("pmfl")])
def test_a_huge_reply_is_rejected(tmp_path, monkeypatch, method):
    send_huge(monkeypatch)
    summary, model, *_ = run_tiny(tmp_path / "run", f"strategy={method}", *LOCAL)
    assert summary["replies_rejected"] > 0
    assert summary["status"] == "finished"
    assert max(float(tensor.abs().max()) for tensor in model.values()) < 1e3


WITHOUT_LIMIT = (*LOCAL, "strategy=fedavg", "engine.max_norm_ratio=null")


def test_a_model_that_exploded_is_reported(tmp_path, monkeypatch, capsys, expect_error):
    send_huge(monkeypatch, 1e12)
    summary, *_ = run_tiny(tmp_path / "on", *WITHOUT_LIMIT)
    assert summary["status"] == "diverged"
    assert "the global model diverged" in capsys.readouterr().out
    with expect_error("on_divergence", RunStopped) as stopped:
        run_tiny(tmp_path / "stop", *WITHOUT_LIMIT, "on_divergence=stop")
    assert stopped.value.status == "diverged"
    assert json.loads((tmp_path / "stop" / "summary.json").read_text())["status"] == "diverged"


def test_the_last_checkpoint_before_replies_were_rejected_is_kept(tmp_path, monkeypatch):
    """From round 3 on no reply is accepted: checkpoint 1 is the newest after which any was, and outlives checkpoint_keep."""
    for client in range(6):
        send_huge(monkeypatch, float("nan"), client, first=3)
    how = ("checkpoint_every=1", "checkpoint_keep=2", "num_rounds=6", "strategy=fedavg", *LOCAL, f"output_dir={tmp_path}/run")
    run(config_of(*TINY_RUN, "participation=full", *how))
    assert [int(path.name) for path in checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")] == [1, 5, 6]


def test_a_checkpoint_has_the_norms(tmp_path):
    folder = f"output_dir={tmp_path}/run"
    run(config_of(*TINY_RUN, "participation=full", "strategy=fedavg", *LOCAL, "checkpoint_every=1", folder))
    assert len(checkpoint.find(tmp_path / "run").server()[1]["recent upload norms"]) == 3 * 6


def test_no_reply_of_an_ordinary_run_is_rejected(tmp_path):
    summary, *_ = run_tiny(tmp_path / "run", *LOCAL, "strategy=fedcrl", "num_rounds=6")
    assert summary["replies_rejected"] == 0
