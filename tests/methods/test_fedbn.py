"""FedBN: a round by hand, no normalisation layer travels, golden runs, and FedAvg without normalisation layers."""

import pytest
import torch
from helpers import Schedule, config_of, run_scalar, run_strategy, strategy_settings, workspace_of

from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID

NETWORK = {"name": "cnn_bn", "channels": [2], "kernel": 3, "hidden": [4], "momentum": 0.1, "buffers": "average"}


def run_on_digits(method, rounds, **changes):
    """Run a method with BatchNorm; return the global models, what clients remember, and the strategy."""
    config = config_of("num_clients=3", "partition=iid") | {"model": NETWORK, "strategy": strategy_settings(method, **changes)}
    workspace, grid = workspace_of(config, dtype=torch.float64), LocalGrid(3, 1)
    models, strategy = run_strategy(workspace, config, Schedule(rounds), len(rounds), grid=grid)
    return models, {client - FIRST_NODE_ID: grid.client_states.get(client) for client in grid.client_states}, strategy


LOCAL = {"epochs": None, "iterations": 2, "batch_size": 8, "lr": 0.1}


def test_a_round_by_hand():
    """Two clients: shared tensors are the plain mean of what each alone makes; normalisation layers are each one's own."""
    both, memory, _ = run_on_digits("fedbn", [[0, 1]], local=LOCAL)
    alone = {client: run_on_digits("fedbn", [[client]], local=LOCAL) for client in (0, 1)}
    for name, value in both[1].items():
        if name.startswith(("encoder.stages.0.1.", "encoder.stages.1.1.")):
            assert torch.equal(value, both[0][name])
        else:
            mean = (alone[0][0][1][name].double() + alone[1][0][1][name].double()) / 2
            torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-6)
    for client in (0, 1):
        own, same_alone = memory[client], alone[client][1][client]
        assert {name.rpartition(".")[2] for name in own} == {
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "num_batches_tracked",
        }
        for name, value in own.items():
            assert torch.equal(value, same_alone[name])


def test_no_normalisation_layer_travels():
    _, _, strategy = run_on_digits("fedbn", [[0]], local=LOCAL)
    crossed = [name.partition("/")[2] for name in (*strategy.broadcast_spec, *strategy.upload_spec)]
    assert not any(name.startswith(("encoder.stages.0.1.", "encoder.stages.1.1.")) for name in crossed)
    assert strategy.personal
    assert not strategy.has_global_model


def test_without_normalisation_layers_it_is_fedavg_with_equal_weights():
    fedbn, fedavg = (run_scalar(name, [[0, 1, 2]] * 5, weights="uniform") for name in ("fedbn", "fedavg"))
    assert fedbn == fedavg
    assert fedbn == pytest.approx([2.19, 2.3439, 2.468559, 2.569533, 2.651322], abs=1e-6)
