"""Large cohorts are summed in chunks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Schedule, config_of, run_strategy, slow, workspace_of

from contrafed.runs.notices import said_of_replies
from contrafed.runs.run import run
from contrafed.server import chunks
from contrafed.server.replies import Reply


def run_chunked(monkeypatch, size, name="fedavg", **changes):
    monkeypatch.setattr(chunks, "CHUNK_CLIENTS", size)
    config = config_of("num_clients=7", "model=mlp", "model.hidden=[4]", f"strategy={name}")
    config["strategy"] |= changes
    return run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(7), range(1, 6)]), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedavg", {}),
        slow("fedavg", {"weights": "uniform"}),
        slow("fedavg", {"weights": "all_clients"}),
        slow("fedavgm", {}),
        ("fedhyper", {}),
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


def test_sums_of_chunks_know_only_the_declared_weights(monkeypatch):
    _, strategy = run_chunked(monkeypatch, 2)
    sums = chunks.SummedReplies(strategy)
    sums.add([Reply(k, {"model/w": torch.tensor([float(k)])}, 1 + k, {}, {"model/w": torch.ones(1)}) for k in range(3)])
    assert float(sums.weighted_sum("model", np.array([1.0, 2.0, 3.0]))["w"]) == 8
    assert float(sums.weighted_sum("delta", np.array([2.0, 4.0, 6.0]))["w"]) == 4
    with pytest.raises(RuntimeError, match="other weights than its reply_weights"):
        sums.weighted_sum("model", np.ones(3))
    with pytest.raises(RuntimeError, match="says linear_in_updates and reads model of single replies"):
        sums.models()
