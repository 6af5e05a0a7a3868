"""The three engines give the same numbers; faults stay where they happen; memory survives workers."""

import os
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from rig import METHODS, PERSONAL, Schedule, config_of, digits_run, run_strategy, same, workspace_of
from safetensors.torch import load_file

import clients.node.app
import simulation.ray
from clients.training.workspace import install, uninstall
from contrafed.experiment import run
from core import codec
from core.errors import UserError
from core.run import node_run
from simulation import shared
from simulation.grid import LocalGrid
from simulation.scheduling import balanced, guided
from simulation.worker import FIRST_NODE_ID, RUN_ID
from strategies.replies import norm, read_reply

TINY = (
    "partition.test_fraction=0.2",
    "num_nodes=6",
    "num_rounds=3",
    "eval_every=1",
    "model=mlp",
    "model.hidden=[12]",
    "partition.min_node_size=5",
)
HALF = ("participation=bernoulli", "participation.beta=null", "participation.mean_probability=0.5")


def run_tiny(folder, *overrides):
    """Run the tiny experiment for real; returns (summary, final model, metrics.csv, nodes.csv)."""
    summary = run(config_of(*TINY, *HALF, f"output_dir={folder}", *overrides))
    out = summary["folder"]
    read = lambda name: open(os.path.join(out, name), "rb").read()  # noqa: E731, SIM115
    return summary, load_file(os.path.join(out, "model.safetensors")), read("metrics.csv"), read("nodes.csv")


@pytest.fixture(scope="module")
def local_runs(tmp_path_factory):
    """One local run per method, made when first asked for."""
    done = {}

    def get(method):
        if method not in done:
            done[method] = run_tiny(tmp_path_factory.mktemp(method) / "run", f"strategy={method}", "engine=local")
        return done[method]

    return get


@pytest.mark.parametrize(
    ("method", "workers"), [*((m, 2) for m in (*METHODS, "fedagm", "fedcrl", "mpfedcon", "fedproto")), ("pmfl", 1)]
)
def test_ray_equals_local_bit_for_bit(tmp_path, local_runs, monkeypatch, method, workers):
    renewed = []
    renew = shared.Broadcast.renew
    monkeypatch.setattr(shared.Broadcast, "renew", lambda self, size=None: (renewed.append(size), renew(self, size)))
    summary, model, metrics, nodes = run_tiny(tmp_path / "run", f"strategy={method}", "engine=ray", f"engine.workers={workers}")
    _, expected, expected_metrics, expected_nodes = local_runs(method)
    assert summary["failures"] == summary["replies_rejected"] == 0
    assert same(model, expected)
    assert metrics == expected_metrics
    assert nodes == expected_nodes
    assert None not in renewed, "a node kept hold of a broadcast, which then cannot use the same memory again"
    assert renewed or not hasattr(os, "memfd_create")  # it did go through shared memory


def test_three_ray_workers_equal_local(tmp_path, local_runs, monkeypatch):
    monkeypatch.setattr(simulation.ray, "LEAST", 0)
    half = ("engine=ray", "engine.workers=3", "engine.cpus_per_worker=0.5")
    _, model, metrics, _ = run_tiny(tmp_path / "run", "strategy=pmfl", *half)
    assert same(model, local_runs("pmfl")[1])
    assert metrics == local_runs("pmfl")[2]


@pytest.mark.parametrize("far", ["all", "one"])
def test_workers_that_share_no_memory_with_the_driver_get_everything_through_ray(tmp_path, local_runs, monkeypatch, far):
    def reachable(grid, messages, timeout):
        grid.near = [worker > 0 and far == "one" for worker in range(len(grid.near))]
        return original(grid, messages, timeout)

    original = simulation.ray.RayGrid.execute
    if far == "all":
        monkeypatch.setattr(shared, "limit", lambda: 0)  # as on a system without such memory
    else:
        monkeypatch.setattr(simulation.ray.RayGrid, "execute", reachable)
    _, model, metrics, nodes = run_tiny(tmp_path / "run", "strategy=pmfl", "engine=ray", "engine.workers=2")
    assert same(model, local_runs("pmfl")[1])
    assert (metrics, nodes) == local_runs("pmfl")[2:]


# FedAvg sends models and keeps nothing, PMFL sends changes and remembers models: between them every message shape.
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "pmfl",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedprox", "moon", "fedau", "fedrcl", "fedagm", *PERSONAL)),
    ],
)
def test_flowers_own_runtime_equals_local_bit_for_bit(tmp_path, local_runs, method):
    summary, model, metrics, nodes = run_tiny(tmp_path / "run", f"strategy={method}", "engine=flower")
    _, expected, expected_metrics, expected_nodes = local_runs(method)
    assert summary["failures"] == 0
    assert same(model, expected)
    assert metrics == expected_metrics
    assert nodes == expected_nodes


def test_the_same_seed_twice_gives_the_same_bytes_and_another_seed_does_not(tmp_path, local_runs):
    again = run_tiny(tmp_path / "a", "strategy=pmfl", "engine=local")
    assert again[2:] == local_runs("pmfl")[2:]
    other = run_tiny(tmp_path / "b", "strategy=pmfl", "engine=local", "seed=1")
    assert other[2] != again[2]


def test_stack_size_changes_numbers_only_by_rounding(tmp_path, local_runs):
    _, model, _, _ = run_tiny(tmp_path / "run", "strategy=pmfl", "engine=local", "engine.stack_size=4")
    for name, value in local_runs("pmfl")[1].items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_ray_nodes_equal_one(tmp_path, local_runs):
    """A cluster of two Ray nodes on this machine, one worker on each."""
    import ray
    from ray.cluster_utils import Cluster

    from simulation.ray import stop_ray

    stop_ray()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        overrides = (f"engine.address={cluster.address}", "engine.workers=2", "engine=ray")
        _, model, metrics, nodes = run_tiny(tmp_path / "run", "strategy=pmfl", *overrides)
        assert len([n for n in ray.nodes() if n["Alive"]]) == 2
        _, expected, expected_metrics, expected_nodes = local_runs("pmfl")
        assert same(model, expected)
        assert (metrics, nodes) == (expected_metrics, expected_nodes)
    finally:
        stop_ray()
        cluster.shutdown()


@pytest.mark.parametrize("least", [simulation.ray.LEAST, 0])
def test_a_killed_worker_is_replaced_and_the_numbers_do_not_change(tmp_path, local_runs, monkeypatch, least):
    """Each of two workers dies before a round: its messages run again, and PMFL's nodes still have their memory."""
    import ray

    monkeypatch.setattr(simulation.ray, "LEAST", least)  # 0: every batch is cut as far as it goes
    killed = []
    original = simulation.ray.RayGrid.execute

    def execute(grid, messages, timeout):
        if grid.memory and len(killed) < 2:
            killed.append(grid.workers[len(killed)])
            ray.kill(killed[-1])
        return original(grid, messages, timeout)

    simulation.ray.RayGrid.execute = execute
    try:
        summary, model, metrics, _ = run_tiny(tmp_path / "run", "strategy=pmfl", "engine=ray", "engine.workers=2")
    finally:
        simulation.ray.RayGrid.execute = original
    assert len(killed) == 2
    assert summary["failures"] == 0
    assert same(model, local_runs("pmfl")[1])
    assert metrics == local_runs("pmfl")[2]


class Fragile(simulation.ray.Worker):
    """A worker that dies whenever it meets node 2."""

    def _results(self, records, batch, *states):
        if any(metadata.dst_node_id == FIRST_NODE_ID + 2 for metadata, _, _ in batch.messages):
            os._exit(1)
        return super()._results(records, batch, *states)


@pytest.mark.parametrize("least", [simulation.ray.LEAST, 0])
def test_a_node_that_kills_its_worker_fails_alone(tmp_path, monkeypatch, capsys, least):
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(simulation.ray, "Worker", Fragile)
    monkeypatch.setattr(simulation.ray, "LEAST", least)
    asked = ("strategy=fedavg", "participation=full", "engine=ray", "engine.workers=2", "eval_every=1000", "num_rounds=2")
    try:
        summary = run(config_of(*TINY, *asked, f"output_dir={tmp_path / 'run'}"))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert summary["failures"] == 2
    metrics = (tmp_path / "run" / "metrics.csv").read_text()
    for server_round in (1, 2):
        assert f"{server_round},global,system,participants,6\n" in metrics
        assert f"{server_round},global,system,failures,1\n" in metrics
    said = [line for line in capsys.readouterr().out.splitlines() if "node 2:" in line]
    assert said
    assert "its worker died 3 times; the last time: " in said[0]


def test_batches_are_smaller_towards_the_end_and_hold_every_task_once():
    costs = [3.0, 50.0, 1.0, 2.0, 40.0, 8.0, 8.0, 8.0, 1.0, 1.0]
    batches = list(guided(costs, 2, 2.0))
    sums = [sum(costs[i] for i in batch) for batch in batches]
    assert sorted(i for batch in batches for i in batch) == list(range(10))
    assert batches[:2] == [[1], [4]]  # longer than their share, and so alone
    assert sums == sorted(sums, reverse=True)
    assert max(sums[-2:]) <= 3
    assert all(batch == sorted(batch) for batch in batches)


def test_a_short_round_is_one_batch_for_each_worker():
    costs = [1.0, 2.0, 3.0, 4.0]
    assert list(guided(costs, 2, 2.5)) == list(balanced(costs, 2)) == [[0, 3], [1, 2]]
    assert len(list(guided(costs, 2, 2.4))) > 2
    assert list(balanced([5.0], 3)) == [[0]]


def test_more_workers_than_ray_has_cores_is_refused_with_the_numbers(tmp_path):
    with pytest.raises(UserError, match=r"engine.workers=500 needs 500 CPUs and 0 GPUs, Ray has \d+ and 0"):
        run_tiny(tmp_path / "run", "engine=ray", "engine.workers=500")


def test_a_local_run_imports_no_ray():
    code = (
        "import sys\nfrom contrafed import run, compose\n"
        "run(compose('engine=local', 'num_nodes=4', 'num_rounds=1', 'model=mlp', f'output_dir={sys.argv[1]}'))\n"
        "assert 'ray' not in sys.modules, 'ray was imported'\n"
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder + "/run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------------------- the Grid


def tiny_workspace(*overrides):
    config = config_of(*TINY, *overrides)
    workspace = workspace_of(config)
    return config, workspace, node_run(config).to_json()


def train_message(workspace, settings, node=0, server_round=1):
    record = codec.to_record({f"model/{n}": v for n, v in workspace.initial.items()})
    scalars = ConfigRecord({"server-round": server_round, "settings": settings, "cost": 1})
    return Message(RecordDict({"arrays": record, "config": scalars}), FIRST_NODE_ID + node, MessageType.TRAIN)


@pytest.fixture
def tiny():
    config, workspace, settings = tiny_workspace("strategy=moon")
    grid = LocalGrid(6, 1)
    install(settings, workspace)
    yield workspace, settings, grid
    uninstall()


def test_grid_validates_messages(tiny):
    workspace, settings, grid = tiny
    stranger = train_message(workspace, settings, node=6)
    with pytest.raises(ValueError, match="there is no node 1006"):
        grid.push_messages([stranger])
    sent = train_message(workspace, settings)
    grid.push_messages([sent])
    with pytest.raises(ValueError, match="already has an id"):
        grid.push_messages([sent])
    assert grid.get_node_ids() == [1000 + k for k in range(6)]


def test_push_then_pull(tiny):
    workspace, settings, grid = tiny
    ids = list(grid.push_messages(train_message(workspace, settings, node=k) for k in (3, 1)))
    replies = list(grid.pull_messages(ids))
    assert [r.metadata.src_node_id for r in replies] == [1003, 1001]
    assert [r.metadata.reply_to_message_id for r in replies] == ids
    assert list(grid.pull_messages(ids)) == []


def test_a_client_cannot_reach_its_neighbours_through_the_shared_message(tiny, monkeypatch):
    workspace, settings, grid = tiny
    shared = train_message(workspace, settings).content
    messages = [Message(shared, FIRST_NODE_ID + k, MessageType.TRAIN) for k in range(2)]
    before = {n: t.clone() for n, t in codec.from_record(shared["arrays"]).items()}
    original = clients.node.app._received

    def vandal(stack):
        received = original(stack)
        for message in stack:
            message.content["arrays"].clear()
            message.content["config"]["settings"] = "gone"
        return received

    monkeypatch.setattr(clients.node.app, "_received", vandal)
    replies = list(grid.send_and_receive(messages))
    assert not any(r.has_error() for r in replies)
    assert same(codec.from_record(shared["arrays"]), before)


def test_a_faulty_node_fails_alone_and_keeps_its_memory(monkeypatch):
    """In a stack of four, node 2 raises in round 2: the other three count, node 2 keeps the memory of round 1."""
    config, workspace, settings = tiny_workspace("strategy=moon")
    grid = LocalGrid(6, 4)
    original = workspace.client_class.local_work

    def local_work(client, stack):
        if stack.server_round == 2 and 2 in stack.nodes:
            raise RuntimeError("broken sensor")
        return original(client, stack)

    monkeypatch.setattr(workspace.client_class, "local_work", local_work)
    held = []

    class Spy:
        node_ids = grid.node_ids

        def send_and_receive(self, messages, *, timeout=None):
            replies = list(grid.send_and_receive(messages, timeout=timeout))
            held.append({n: {k: t.clone() for k, t in grid.memory.get(n).items()} for n in grid.memory})
            return replies

    _, strategy = run_strategy(workspace, config, Schedule([range(4)] * 2), 2, grid=grid, wrap=lambda g: Spy(), may_fail=True)
    assert strategy.round.rejected["failed"] == 1
    assert strategy.round.failures == ["node 2: node 2, round 2, step 0: RuntimeError: broken sensor"]
    first, second = held
    assert same(first[1002], second[1002])
    assert not same(first[1001], second[1001])


def test_out_of_time_nodes_do_not_answer(tiny):
    workspace, settings, grid = tiny
    messages = [train_message(workspace, settings, node=k) for k in range(3)]
    assert list(grid.send_and_receive(messages, timeout=0.0)) == []
    assert not list(grid.memory)


def test_an_unknown_message_type_is_an_error_reply(tiny):
    workspace, settings, grid = tiny
    message = train_message(workspace, settings)
    other = Message(message.content, FIRST_NODE_ID, "train.elsewhere")
    (reply,) = grid.send_and_receive([other])
    assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "elsewhere" in reply.error.reason


# ---------------------------------------------------------------------------------------------- ClientApp, codec, NumPyClient


def test_messages_survive_the_wire(tiny):
    """Through Flower's own wire form and back: the ClientApp gives the very same reply."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    workspace, settings, grid = tiny
    message = train_message(workspace, settings)
    message.metadata.__dict__["_message_id"] = "m1"
    objects = {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(message.object_id, objects)
    received.metadata.__dict__["_message_id"] = "m1"
    assert not isinstance(next(iter(received.content["arrays"].values())), codec.TensorArray)

    def context():
        return Context(RUN_ID, FIRST_NODE_ID, {"partition-id": 0}, RecordDict(), {})

    wire_context, near_context = context(), context()
    far = clients.node.app.app(received, wire_context)
    (near,) = clients.node.app.run_stack([message], [near_context])
    assert same(codec.from_record(far.content["arrays"]), codec.from_record(near.content["arrays"]))
    assert dict(far.content["metrics"]) == dict(near.content["metrics"])
    assert same(codec.state_of(wire_context.state, "memory"), codec.state_of(near_context.state, "memory"))


def test_tensor_arrays_pickle_and_serialise_like_flowers():
    for tensor in (torch.randn(3, 4), torch.randn(4, 3).T, torch.tensor(5), torch.arange(3)):
        array = codec.TensorArray(tensor)
        assert torch.equal(codec.to_tensor(pickle.loads(pickle.dumps(array))), tensor)
        flowers = ArrayRecord([tensor.contiguous().numpy()])["0"]
        assert (array.dtype, array.shape, array.stype) == (flowers.dtype, flowers.shape, flowers.stype)
        assert np.array_equal(codec.to_tensor(flowers).numpy(), array.numpy())


@pytest.mark.parametrize("method", METHODS)
def test_plain_numpy_client(method):
    """get_parameters, fit and evaluate for one node, and again as a legacy ``client_fn``."""
    config, workspace, settings = tiny_workspace(f"strategy={method}", "partition.test_fraction=0.3")
    client = workspace.client_class(workspace, [1])
    start = client.get_parameters({})
    assert [a.shape for a in start] == [tuple(p.shape) for p in workspace.initial.values()]
    arrays, count, metrics = client.fit(start, {"server-round": 1})
    assert count == len(workspace.federation.partition.train(1))
    assert metrics["loss"] > 0
    assert [a.shape for a in arrays] == [a.shape for a in start]
    loss, tested, scores = client.evaluate(start, {})
    assert tested == len(workspace.federation.partition.test(1))
    assert loss > 0
    assert 0 <= scores["accuracy"] <= 1
    arrays_again, _, _ = workspace.client_class(workspace, [1]).fit(start, {})
    assert all(np.array_equal(a, b) for a, b in zip(arrays, arrays_again, strict=True))


def test_legacy_client_fn():
    from flwr.clientapp import ClientApp
    from flwr.compat.common.parameter import ndarrays_to_parameters, parameters_to_ndarrays
    from flwr.compat.common.recorddict_compat import fitins_to_recorddict, recorddict_to_fitres
    from flwr.compat.common.typing import FitIns

    config, workspace, settings = tiny_workspace("strategy=moon")
    LocalGrid(6, 1)  # tells Flower which run this process belongs to
    legacy = ClientApp(client_fn=lambda context: workspace.client_class(workspace, [0]).to_client())
    client = workspace.client_class(workspace, [0])
    start = client.get_parameters({})
    content = fitins_to_recorddict(FitIns(ndarrays_to_parameters(start), {"server-round": 1}), keep_input=True)
    message = Message(content, FIRST_NODE_ID, MessageType.TRAIN)
    reply = legacy(message, Context(RUN_ID, FIRST_NODE_ID, {"partition-id": 0}, RecordDict(), {}))
    result = recorddict_to_fitres(reply.content, keep_input=True)
    expected, count, _ = client.fit(start, {"server-round": 1})
    assert result.num_examples == count
    assert all(np.array_equal(a, b) for a, b in zip(parameters_to_ndarrays(result.parameters), expected, strict=True))


# ------------------------------------------------------------------------------------------------------------ replies


def poisoned(kind):
    """A grid whose node 1 answers with something it should not."""

    class Poison:
        def __init__(self, grid):
            self.grid, self.node_ids = grid, grid.node_ids

        def send_and_receive(self, messages, *, timeout=None):
            replies = list(self.grid.send_and_receive(messages, timeout=timeout))
            for reply in replies:
                if reply.metadata.src_node_id == FIRST_NODE_ID + 1:
                    kind(reply)
            return replies

    return Poison


def first_name(reply):
    return next(iter(reply.content["arrays"]))


def nan(reply):
    name = first_name(reply)
    bad = codec.to_tensor(reply.content["arrays"][name]).clone()
    bad.view(-1)[0] = float("nan")
    reply.content["arrays"][name] = codec.TensorArray(bad)


def shape(reply):
    reply.content["arrays"][first_name(reply)] = codec.TensorArray(torch.zeros(2, 2))


def names(reply):
    reply.content["arrays"]["model/extra"] = codec.TensorArray(torch.zeros(1))


def dtype(reply):
    name = first_name(reply)
    whole = codec.to_tensor(reply.content["arrays"][name]).long()
    reply.content["arrays"][name] = codec.TensorArray(whole)


def count(reply):
    reply.content["metrics"]["num-examples"] = 0


def content(reply):
    del reply.content["metrics"]


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (nan, "not finite"),
        (shape, "wrong shape"),
        (names, "wrong tensor names"),
        (dtype, "wrong dtype"),
        (count, "no examples"),
        (content, "malformed content"),
    ],
)
def test_a_malformed_reply_is_counted_by_cause_and_left_out(kind, cause):
    config, workspace, _ = tiny_workspace("strategy=fedavg")
    models, strategy = run_strategy(workspace, config, Schedule([[0, 1, 2]]), 1, wrap=poisoned(kind), may_fail=True)
    assert dict(strategy.round.rejected) == {cause: 1}
    without, _ = run_strategy(workspace_of(config), config, Schedule([[0, 2]]), 1)
    assert same(models[-1], without[-1])


def test_a_reply_beyond_the_norm_bound_is_rejected():
    _, strategy = digits_run("pmfl", 1, nodes=2)
    sent = Message(RecordDict(), FIRST_NODE_ID, MessageType.TRAIN)
    tensors = {name: torch.ones(s) for name, s in strategy.up.items()}
    from flwr.app import MetricRecord

    reply = Message(
        RecordDict({"arrays": codec.to_record(tensors), "metrics": MetricRecord({"num-examples": 1})}), reply_to=sent
    )
    with pytest.raises(ValueError, match="norm too large"):
        read_reply(0, reply, strategy.up, {}, 1e-6)
    assert read_reply(0, reply, strategy.up, {}, 1e6).node == 0


def test_rounds_with_nobody_and_empty_nodes_pass():
    config, workspace, _ = tiny_workspace("strategy=pmfl")
    models, _ = run_strategy(workspace, config, Schedule([[], [], []]), 3)
    assert same(models[0], models[-1])


# -------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("engine", ["local", "ray", "flower"])
def test_ctrl_c_leaves_everything_written(tmp_path, engine):
    command = [
        sys.executable,
        "main.py",
        f"engine={engine}",
        "num_rounds=100000",
        "num_nodes=8",
        "eval_every=1",
        "model=mlp",
        f"output_dir={tmp_path}/run",
    ]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts background jobs deaf to Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "run" / "metrics.csv"
    ends = time.monotonic() + 240
    while time.monotonic() < ends and not (metrics.exists() and metrics.read_text().count("\n") > 60):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    import json

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] >= 5
    for name in ("model.safetensors", "accuracy.png", "participation.png", "partition.png", "config.yaml"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_evaluation_in_parallel_shards_equals_one_pass():
    """Shards run in threads: each must see the model that is judged, and the sums must not depend on the cores."""
    from clients.base import score
    from contrafed.evaluation import evaluate_in_parallel

    config, workspace, _ = tiny_workspace("model=cnn_pmfl")
    index = np.arange(len(workspace.federation.data.y)).repeat(4)  # 7 shards
    expected = torch.nn.functional.cross_entropy(
        workspace.model(workspace.images(torch.from_numpy(index))).logits, workspace.y[index]
    ).item()
    config = {**config, "eval_train": False}
    for _ in range(5):
        loss, accuracy = evaluate_in_parallel(workspace, workspace.model, index)
        assert loss == pytest.approx(expected, rel=1e-5)
        assert accuracy == score(workspace, workspace.model, index)[1]


def test_training_accuracy_is_that_of_the_model_that_is_tested(tmp_path):
    """More than one shard of training data: scores must equal those of the saved model."""
    import csv

    from torch.func import functional_call

    config = config_of("engine=local", "model=cnn_pmfl", "eval_train=true", "num_rounds=3", f"output_dir={tmp_path}/run")
    folder = run(config)["folder"]
    workspace = workspace_of(config)
    index = torch.from_numpy(
        np.concatenate([workspace.federation.partition.train(n) for n in range(workspace.federation.num_nodes)])
    )
    logits = functional_call(workspace.model, load_file(f"{folder}/model.safetensors"), (workspace.images(index),)).logits
    with open(f"{folder}/metrics.csv") as file:
        rows = [r for r in csv.DictReader(file) if (r["split"], r["metric"], r["round"]) == ("train", "accuracy", "3")]
    assert float(rows[0]["value"]) == pytest.approx((logits.argmax(1) == workspace.y[index]).double().mean().item())


def test_the_norm_is_infinite_only_when_an_element_is():
    assert norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert norm([torch.full((4,), 1e30)]) == pytest.approx(2e30)  # its square overflows float32
    assert norm([]) == 0
    for bad in (float("nan"), float("inf")):
        assert not np.isfinite(norm([torch.ones(3), torch.tensor([1.0, bad])]))
