"""Large cohorts are summed in chunks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Schedule, config_of, run_strategy, same, slow, workspace_of

from contrafed.core.errors import RunStopped
from contrafed.runs.notices import said_of_replies
from contrafed.runs.run import run
from contrafed.server import chunks
from contrafed.server.replies import Reply
from contrafed.strategies.fedavg import FedAvg


def run_chunked(monkeypatch, size, name="fedavg", rule=None, **changes):
    monkeypatch.setattr(chunks, "CHUNK_CLIENTS", size)
    config = config_of("num_clients=7", "model=mlp", "model.hidden=[4]", f"strategy={name}")
    config["strategy"] |= changes
    return run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(7), range(1, 6)]), 2, rule=rule)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedavg", {}),
        slow("fedavg", {"weights": "uniform"}),
        slow("fedavg", {"weights": "all_clients"}),
        slow("fedavgm", {}),
        ("fedhyper", {}),
        slow("fedadam", {}),
        slow("fedyogi", {}),
        slow("fedagm", {}),
        slow("pfedme", {}),
    ],
)
def test_chunks_change_sums_only_by_rounding(monkeypatch, name, changes):
    whole, divided = (run_chunked(monkeypatch, size, name, **changes) for size in (7, 2))
    assert whole[1].chunks is None
    assert divided[1].chunks.left == 0
    assert divided[1].round.accepted == whole[1].round.accepted == 5
    for ours, theirs in zip(whole[0], divided[0], strict=True):
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-7)


def test_a_run_in_chunks_ends_with_its_summary(monkeypatch, tmp_path):
    monkeypatch.setattr(chunks, "CHUNK_CLIENTS", 2)
    small = ("num_clients=7", "participation=full", "num_rounds=2", "model=mlp", "model.hidden=[4]", "engine=local")
    summary = run(config_of(*small, "strategy=fedavg", "partition=sampled", "eval_every=2", f"output_dir={tmp_path}/run"))
    assert (summary["status"], summary["rounds"], summary["failures"]) == ("finished", 2, 0)
    rows = (tmp_path / "run" / "participants.csv").read_text().split()[1:]
    assert rows == [f"{server_round},{client}" for server_round in (1, 2) for client in range(7)]


@pytest.mark.parametrize("buffers", ["frozen", "local", "average"])
def test_buffers_that_are_not_sent_need_no_single_replies(monkeypatch, buffers):
    network = ("model=cnn_bn", "model.channels=[2]", "model.hidden=[4]", f"model.buffers={buffers}")
    config = config_of("num_clients=7", "strategy=fedavg", "partition.min_client_size=20", *network)
    models = []
    for size in (7, 2):
        monkeypatch.setattr(chunks, "CHUNK_CLIENTS", size)
        workspace = workspace_of(config, dtype=torch.float64)
        _, strategy = run_strategy(workspace, config, Schedule([range(7), range(1, 6)]), 2)
        models.append(strategy.model)
        assert bool(chunks.find_obstacle(strategy)) == (buffers == "average")
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-6, atol=1e-7)


def test_a_strategy_that_needs_all_replies_says_why(monkeypatch):
    _, strategy = run_chunked(monkeypatch, 2, "pmfl")
    assert strategy.chunks is None
    assert chunks.find_obstacle(strategy) == "PMFL reads replies one by one"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("fedavg", ""),
        ("pmfl", "up to 1000 replies of a round are in memory at once, 0.0012 GB: PMFL reads replies one by one"),
    ],
)
def test_a_strategy_that_needs_all_replies_says_what_they_take(monkeypatch, name, wanted):
    _, strategy = run_chunked(monkeypatch, 256, name)
    strategy.participation.select = None
    assert said_of_replies(SimpleNamespace(num_trained=1000), strategy) == wanted
    assert said_of_replies(SimpleNamespace(num_trained=256), strategy) == ""


def weigh(clients, num_examples):
    return np.sqrt(num_examples)


class Own(FedAvg):
    linear_in_updates = True

    def aggregate(self, model, replies):
        return replies.mean("model", weigh(replies.clients, replies.num_examples))


class Stated(Own):
    linear_in_updates = True

    def reply_weights(self, clients, num_examples):
        return weigh(clients, num_examples)


class Wrong(Own):
    linear_in_updates = True
    reply_weights = FedAvg.reply_weights


def test_inherited_weights_are_those_of_an_inherited_aggregate(monkeypatch, expect_error):
    (whole, _), (own, first), (stated, second) = (
        run_chunked(monkeypatch, size, rule=rule) for size, rule in ((7, Own), (2, Own), (2, Stated))
    )
    assert first.chunks is None
    assert second.chunks is not None
    assert all(same(ours, theirs) for ours, theirs in zip(own, whole, strict=True))
    for key in whole[-1]:
        torch.testing.assert_close(stated[-1][key], whole[-1][key], rtol=1e-6, atol=1e-7)
    with expect_error("Wrong.aggregate", RunStopped):
        run_chunked(monkeypatch, 2, rule=Wrong)


def test_sums_of_chunks_know_only_the_declared_weights(monkeypatch, expect_error):
    _, strategy = run_chunked(monkeypatch, 2)
    sums = chunks.SummedReplies(strategy)
    sums.add([Reply(k, {"model/w": torch.tensor([float(k)])}, 1 + k, {}, {"model/w": torch.ones(1)}) for k in range(3)])
    assert float(sums.weighted_sum("model", np.array([1.0, 2.0, 3.0]))["w"]) == 8
    assert float(sums.weighted_sum("delta", np.array([2.0, 4.0, 6.0]))["w"]) == 4
    with expect_error("FedAvg.aggregate", RunStopped):
        sums.weighted_sum("model", np.ones(3))
    with expect_error("FedAvg.aggregate", RunStopped):
        sums.models()
