"""On CPUs stacks are cut from the whole round, so that the same ``engine.stack_size`` gives the same bytes in each engine."""

import itertools

import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from helpers import config_of, same, workspace_of
from tiny import run_tiny

from contrafed.engines.engine_run import TINY_STACK_CLIENTS, stack_size_for
from contrafed.engines.scheduling import cut_stacks
from contrafed.engines.worker import FIRST_NODE_ID, identify


def test_whole_stacks_are_cut_again_as_they_were():
    identify()
    costs = [3.0, 5.0, 3.0, 1.0, 5.0, 3.0, 2.0]
    messages = [
        Message(RecordDict({"config": ConfigRecord({"cost": cost})}), FIRST_NODE_ID + k, MessageType.TRAIN)
        for k, cost in enumerate(costs)
    ]
    stacks = cut_stacks(messages, range(7), 2)
    assert stacks == [[1, 4], [0, 2], [5, 6], [3]]
    for count in range(1, 5):
        for some in itertools.combinations(stacks, count):
            batch = [messages[i] for stack in some for i in stack]
            again = cut_stacks(batch, range(len(batch)), 2)
            assert [[batch[i] for i in stack] for stack in again] == [[messages[i] for i in stack] for stack in some]


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (("model=mlp",), TINY_STACK_CLIENTS),
        (("model=mlp", "model.hidden=[]"), TINY_STACK_CLIENTS),
        (("model=mlp", "model.hidden=[4000]"), 1),
        (("model=lenet",), 1),
    ],
)
def test_auto_stacks_tiny_models_of_fully_connected_layers(overrides, size):
    workspace = workspace_of(config_of(*overrides))
    assert [stack_size_for(wanted, workspace) for wanted in ("auto", None, 3)] == [size, 1, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "workers"), [("fedavg", 2), *(("pmfl", workers) for workers in (1, 2, 3))])
def test_ray_equals_local_bit_for_bit_with_the_same_stacks(tmp_path, monkeypatch, method, workers):
    """Clients have different numbers of steps. Each worker's share of a round has more than one stack."""
    monkeypatch.setattr("contrafed.engines.ray.MIN_BATCH_SECONDS", 1e-4)
    how = (f"strategy={method}", "participation.mean_probability=0.9", "num_clients=9", "strategy.local.iterations=null")
    how += ("strategy.local.epochs=1", "engine.stack_size=2")
    there = run_tiny(tmp_path / "ray", "engine=ray", f"engine.workers={workers}", "engine.cpus_per_worker=0.5", *how)
    here = run_tiny(tmp_path / "local", "engine=local", *how)
    alone = run_tiny(tmp_path / "alone", "engine=local", *how, "engine.stack_size=1")
    assert there[0]["failures"] == there[0]["replies_rejected"] == 0
    assert same(there[1], here[1])
    assert there[2:] == here[2:]
    assert not same(here[1], alone[1]), "a test of stacks needs numbers that stacks change"
