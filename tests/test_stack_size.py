"""Tiny models train as stacks on a CPU, with the bits of each client alone. Large cohorts are summed in chunks."""

import numpy as np
import pytest
import torch
from helpers import Schedule, build_received, config_of, run_strategy, sized_workspace, workspace_of

from contrafed.server import chunks
from contrafed.server.replies import Reply
from contrafed.training.workspace import Workspace

SIZES = [40, 33, 17, 40, 5]


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (("model=mlp",), 25),
        (("model=mlp", "model.hidden=[8]"), 128),
        (("model=mlp", "model.hidden=[4000]"), 1),  # not tiny
        (("model=cnn",), 1),
        (("model=mlp", "strategy.local.batch_size=0.5"), 1),
    ],
)
def test_a_stack_on_a_cpu_depends_on_model_and_training_settings(overrides, size):
    workspace = workspace_of(config_of(*overrides), stack_size=None)
    assert (workspace.stack_size, workspace.exact) == (size, size > 1)


def test_a_stated_size_holds():
    for size in (1, 4):
        workspace = workspace_of(config_of("model=mlp"), stack_size=size)
        assert (workspace.stack_size, workspace.exact) == (size, False)


@pytest.mark.parametrize("name", ["fedavg", "pmfl", "moon", "fedcrl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_has_the_same_bits_alone_and_in_a_stack(name, dtype):
    """Clients differ in their numbers of steps and in their client state."""
    local = {"iterations": None, "epochs": 1, "batch_size": 16, "momentum": 0.9, "clip_norm": 1.0}
    workspace = sized_workspace(name, SIZES, local=local)
    workspace = Workspace(workspace.run, dtype=dtype, federation=workspace.federation)
    assert workspace.exact
    received, states = build_received(workspace), [{} for _ in SIZES]
    received = {key: value.to(dtype) for key, value in received.items()}
    for server_round, cohort in enumerate([[0, 1, 2], [0, 1, 2, 3, 4], [4, 2, 0]], 1):
        stack = workspace.client_class(workspace, cohort, [states[k] for k in cohort])
        scores = stack.evaluate_clients([received] * len(cohort), server_round)
        for k, one, score in zip(cohort, stack.update([received] * len(cohort), server_round), scores, strict=True):
            alone = workspace.client_class(workspace, [k], [states[k]])
            assert alone.evaluate_clients([received], server_round)[0].metrics == score.metrics
            (own,) = alone.update([received], server_round)
            assert one.metrics == own.metrics
            for mine, theirs in ((one.tensors, own.tensors), (one.client_state, own.client_state)):
                assert all(torch.equal(value, mine[n]) for n, value in theirs.items())
            states[k] = own.client_state


def test_code_that_vmap_refuses_is_computed_directly():
    workspace = sized_workspace("fedavg", [20, 20])
    directly, workspace = workspace, Workspace(workspace.run, dtype=torch.float64, federation=workspace.federation)
    assert workspace.exact

    class Reading(workspace.client_class):
        def loss(self, params, batch, loss_inputs):
            found = super().loss(params, batch, loss_inputs)
            assert found["loss"].item() > 0
            return found

    received = build_received(workspace)
    (update,) = Reading(workspace, [0]).update([received], 1)
    assert not workspace.exact
    (expected,) = workspace.client_class(directly, [0]).update([received], 1)
    assert all(torch.equal(value, update.tensors[name]) for name, value in expected.tensors.items())


# ------------------------------------------------------------------------------------------------------------------ chunks


def run_chunked(monkeypatch, size, name="fedavg", **changes):
    monkeypatch.setattr(chunks, "CHUNK_CLIENTS", size)
    config = config_of("num_clients=7", "model=mlp", "model.hidden=[4]", f"strategy={name}")
    config["strategy"] |= changes
    return run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(7), range(1, 6)]), 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedavg", {}),
        ("fedavg", {"weights": "uniform"}),
        ("fedavg", {"weights": "all_clients"}),
        ("fedavgm", {}),
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


def test_a_strategy_that_needs_all_replies_says_why(monkeypatch):
    _, strategy = run_chunked(monkeypatch, 2, "pmfl")
    assert strategy.chunks is None
    assert chunks.find_obstacle(strategy) == "PMFL reads replies one by one"


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
