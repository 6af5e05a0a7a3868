"""What devices do that simulated nodes need not: remember on disk, bring data, come and go, and be refused. One process."""

import csv
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from PIL import Image
from rig import config_of, same
from safetensors.torch import load_file, save_file

import clients.node.app
import contrafed.devices
import simulation.members
from clients.node.files import MemoryFileError, StateDir
from clients.training.workspace import uninstall
from contrafed import keys
from contrafed.devices import DeviceGrid
from contrafed.experiment import deployed, run
from contrafed.reporting import RunRecorder
from contrafed.server_app import serve
from core import codec
from core.errors import UserError
from core.run import node_run
from partitions.federation import load_federation
from simulation.members import Members
from simulation.worker import identify

ROOT = Path(__file__).resolve().parent.parent
RUN = 4242
SMALL = (
    "num_nodes=3", "num_rounds=3", "eval_every=1", "participation=full", "model=mlp", "model.hidden=[12]",
    "partition.min_node_size=5", "partition.test_fraction=0.2", "engine=local",
)  # fmt: skip


def over_the_wire(message, pull=lambda content: SimpleNamespace(object_content=content)):
    """The message as its receiver has it: taken apart and put together by what Flower sends it with, part by part."""
    parts = {i: pull(part.deflate()).object_content for i, part in get_all_nested_objects(message).items()}
    found = inflate_object_from_contents(message.object_id, parts)
    found.metadata.__dict__["_message_id"] = message.object_id
    return found


class Wire:
    """A Flower Grid whose nodes are ``app`` in this process, behind Flower's own encoding; node k has the id 10 + k.

    ``change(k, message, reply)`` stands for what may happen to a reply: it returns another, None for none, or raises.
    """

    def __init__(self, *node_configs, change=None, offline=()):
        identify()
        self.contexts = [Context(RUN, 10 + k, c, RecordDict(), {}) for k, c in enumerate(node_configs)]
        self.change, self.offline = change or (lambda k, message, reply: reply), set(offline)
        self.replies, self.log = {}, []
        self._runtime_client = SimpleNamespace(PullObject=lambda content: SimpleNamespace(object_content=content))

    def get_node_ids(self):
        return [c.node_id for c in self.contexts if c.node_id - 10 not in self.offline]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            k = message.metadata.dst_node_id - 10
            self.log.append((k, message.metadata.message_type, message.metadata.ttl))
            received = over_the_wire(message)
            if k in self.offline:
                ids.append(None)
                continue
            ids.append(message.object_id)
            try:
                reply = clients.node.app.app(received, self.contexts[k])
            except Exception as error:
                reply = Message(clients_error(error), reply_to=received)
            self.replies[message.object_id] = lambda k=k, m=received, r=reply: self.change(k, m, r)
        return ids

    def pull_messages(self, ids):
        found = [self.replies.pop(i)() for i in list(ids) if i in self.replies]
        return [over_the_wire(reply, self._runtime_client.PullObject) for reply in found if reply is not None]


def clients_error(error):
    from flwr.app import Error

    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")


def plain(**more):
    return [{"partition-id": k, **{key: str(value).format(k=k) for key, value in more.items()}} for k in range(3)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(contrafed.devices, "POLL", 0.01)
    monkeypatch.setattr(simulation.members, "POLL", 0.01)
    monkeypatch.setattr(RunRecorder, "_draw", lambda self: None)  # figures take longer than these runs
    yield
    uninstall()


def run_devices(folder, wire, *overrides):
    """Run on the devices behind ``wire``; returns (model, metrics.csv, nodes.csv, summary)."""
    config = deployed(" ".join([*SMALL, *overrides, f"output_dir={folder}"]))
    serve(DeviceGrid(wire, RUN), config)
    read = lambda name: (folder / name).read_bytes()  # noqa: E731
    return load_file(folder / "model.safetensors"), read("metrics.csv"), read("nodes.csv"), json.loads(read("summary.json"))


def rows_of(metrics, name):
    return {int(r["round"]): float(r["value"]) for r in csv.DictReader(metrics.decode().splitlines()) if r["metric"] == name}


# -------------------------------------------------------------------------------------------------------------- node memory


@pytest.mark.parametrize("name", ["pmfl", "fedcrl", "moon", "fedper"])
def test_a_node_that_is_another_process_at_every_message_equals_local(tmp_path, name):
    """Nothing in Context.state survives here, so that what a node remembers is what its state-dir holds."""
    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}))

    def forget(k, message, reply):
        assert not wire.contexts[k].state
        return reply

    wire.change = forget
    keep = ("strategy.local.keep_optimizer=true", "strategy.local.optimizer=adam") if name == "moon" else ()
    model, metrics, nodes, _ = run_devices(tmp_path / "devices", wire, f"strategy={name}", *keep)
    local = run(config_of(f"strategy={name}", *SMALL, *keep, f"output_dir={tmp_path}/local"))
    assert same(model, load_file(tmp_path / "local" / "model.safetensors"))
    assert metrics == (tmp_path / "local" / "metrics.csv").read_bytes()
    assert nodes == (tmp_path / "local" / "nodes.csv").read_bytes()
    assert local["failures"] == 0


def test_memory_ends_with_the_run_and_another_runs_is_never_used(tmp_path):
    state = tmp_path / "state0" / "memory"
    run_devices(tmp_path / "a", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=fedcrl")
    assert list(state.iterdir()) == []  # the last evaluation said that it is the last
    run_devices(tmp_path / "b", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=pmfl")
    assert [p.name for p in state.iterdir()] == [f"{RUN}-0.safetensors"]  # PMFL's nodes are not asked to evaluate
    rounds = load_file(state / f"{RUN}-0.safetensors")["rounds"]
    assert rounds == 3
    (state / f"{RUN}-0.safetensors").rename(state / "77-0.safetensors")
    run_devices(tmp_path / "c", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=pmfl")
    assert [p.name for p in state.iterdir()] == [f"{RUN}-0.safetensors"]


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def other_run(path):
    StateDir(path.parent.parent, "7", 1, "pmfl").write({"a": torch.zeros(1)})
    (path.parent / "7-1.safetensors").rename(path)


def other_shape(path):
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith("previous/"))
    StateDir(path.parent.parent, str(RUN), 1, "pmfl").write(tensors | {name: torch.zeros(3, 3)})


def less(path):
    tensors = load_file(path)
    StateDir(path.parent.parent, str(RUN), 1, "pmfl").write({n: t for n, t in tensors.items() if n != "pushed"})


def foreign(path):
    save_file({"x": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncated, "is damaged"), (one_bit, "checksum"), (other_run, "of another run"), (other_shape, "has shape (3, 3)"),
        (less, "pushed is missing"), (foreign, "of another run: None"),
    ],
)  # fmt: skip
def test_a_memory_that_is_not_whole_is_reported_and_begins_anew(tmp_path, capsys, damage, says):
    path = tmp_path / "state1" / "memory" / f"{RUN}-1.safetensors"

    def hit(k, message, reply):
        if k == 1 and message.metadata.group_id == "2" and message.metadata.message_type == "train":
            damage(path)  # after round 2's training: found in round 3
        return reply

    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}), change=hit)
    _, metrics, _, summary = run_devices(tmp_path / "run", wire, "strategy=pmfl")
    assert rows_of(metrics, "memory_lost") == {3: 1}
    assert "round 3: node 1 begins with an empty memory" in (said := capsys.readouterr().out)
    assert says in said
    assert load_file(path)["rounds"] == 1
    assert load_file(tmp_path / "state0" / "memory" / f"{RUN}-0.safetensors")["rounds"] == 3
    assert summary["failures"] == summary["replies_rejected"] == 0


def test_a_crash_while_memory_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    state = StateDir(tmp_path, "1", 0, "pmfl")
    state.write({"a": torch.ones(2), "count": torch.tensor(3)})

    def crash(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        state.write({"a": torch.zeros(2)})
    found = state.read()
    assert torch.equal(found["a"], torch.ones(2))
    assert found["count"] == 3
    with pytest.raises(MemoryFileError, match="of another method: pmfl, not moon"):
        StateDir(tmp_path, "1", 0, "moon").read()


def test_personal_models_stay_below_the_nodes_own_folder(tmp_path, monkeypatch):
    """The server names a run, never a place; what it saved is found again by that name."""
    state = {"state-dir": f"{tmp_path}/state{{k}}"}
    *_, summary = run_devices(tmp_path / "run", Wire(*plain(**state)), "strategy=fedcrl", "save_personal=true")
    assert summary["run_id"] == str(RUN)
    assert not (tmp_path / "run" / "personal").exists()
    for k in range(3):
        assert [p.name for p in (tmp_path / f"state{k}" / "personal" / str(RUN)).iterdir()] == [f"{k}.safetensors"]
    config = deployed(f"evaluate_only={tmp_path}/run engine=local output_dir={tmp_path}/again")
    serve(DeviceGrid(Wire(*plain(**state)), 99), config)
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["personal_accuracy_mean"] == summary["personal_accuracy_mean"]
    with pytest.raises(UserError, match="node 10 cannot take part: --node-config needs state-dir"):
        run_devices(tmp_path / "none", Wire(*plain()), "strategy=fedcrl", "save_personal=true")
    # A path in a message, whoever wrote it, is not where a device writes.
    identify()
    context = Context(RUN, 10, plain(**state)[0], RecordDict(), {})
    places = clients.node.app._places({"save": "/etc"}, context, StateDir(tmp_path / "state0", str(RUN), 0, "fedcrl"))
    assert places == {"save": f"{tmp_path}/state0/personal/{RUN}"}


# -------------------------------------------------------------------------------------------------- who answers, who does not


def answers_but(k, when, what):
    """A node whose replies to round ``when``'s training are ``what(reply)``."""

    def change(node, message, reply):
        hit = node == k and message.metadata.group_id == when and message.metadata.message_type == "train"
        return what(message, reply) if hit else reply

    return change


@functools.cache
def expected_without(*rounds):
    """The same run in which node 1 is away in ``rounds``: FedAvg remembers nothing, so an absent node equals a rejected."""
    with tempfile.TemporaryDirectory() as folder:
        return _without(Path(folder), rounds)


def _without(folder, rounds):
    trace = folder / "trace.csv"
    lines = [f"{k},{t},{int(not (k == 1 and t in rounds))}" for k in range(3) for t in (1, 2, 3)]
    trace.write_text("node,round,available\n" + "\n".join(lines) + "\n")
    small = [o for o in SMALL if not o.startswith("participation")]
    absent = ("participation=trace", f"participation.path={trace}")
    run(config_of("strategy=fedavg", *small, *absent, f"output_dir={folder}/absent"))
    return load_file(folder / "absent" / "model.safetensors")


def with_array(reply, array):
    record = reply.content[codec.ARRAYS]
    name = next(iter(record))
    return Message(RecordDict({**reply.content, codec.ARRAYS: ArrayRecord({**record, name: array})}), metadata=reply.metadata)


def first(reply):
    return next(iter(reply.content[codec.ARRAYS].values()))


def lying(reply, shape):
    """The first array under a .npy header that claims another shape than Flower's does."""
    header = np.lib.format.magic(1, 0)
    text = str({"descr": "<f4", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
    data = header + len(text).to_bytes(2, "little") + text + b"\0" * 64
    return Array("float32", tuple(first(reply).shape), "numpy.ndarray", data)


def no_metrics(message, reply):
    return Message(RecordDict({codec.ARRAYS: reply.content[codec.ARRAYS]}), metadata=reply.metadata)


def unreadable(message, reply):
    raise ValueError("Unexpected object content")


FAULTS = {
    "not finite": (lambda m, r: with_array(r, Array(first(r).numpy() * np.nan)), "replies_rejected"),
    "wrong shape": (lambda m, r: with_array(r, Array(np.zeros((2, 2), np.float32))), "replies_rejected"),
    "claims 2 PB": (lambda m, r: with_array(r, Array("float32", (2**24, 2**24), "numpy.ndarray", b"x")), "replies_rejected"),
    "header claims 2 PB": (lambda m, r: with_array(r, lying(r, (2**24, 2**24))), "replies_rejected"),
    "more bytes than it says": (
        lambda m, r: with_array(r, Array("float32", tuple(first(r).shape), "numpy.ndarray", first(r).data + b"x" * 9999)),
        "replies_rejected",
    ),
    "no array format": (
        lambda m, r: with_array(r, Array("float32", tuple(first(r).shape), "numpy.ndarray", b"x" * 500)),
        "replies_rejected",
    ),
    "pickle": (
        lambda m, r: with_array(r, Array("float32", tuple(first(r).shape), "pickle", first(r).data)),
        "replies_rejected",
    ),
    "no metrics": (no_metrics, "replies_rejected"),
    "another message": (
        lambda m, r: Message(RecordDict({codec.METRICS: MetricRecord({"a": 1})}), reply_to=m),
        "replies_rejected",
    ),
    "unreadable": (unreadable, "failures"),
    "2 MiB": (lambda m, r: with_array(r, Array(np.random.default_rng(0).random(2**18))), "failures"),
    "error": (lambda m, r: Message(clients_error(ValueError("no")), reply_to=m), "failures"),
    "no answer": (lambda m, r: None, "failures"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_reply_costs_only_itself(tmp_path, capsys, fault):
    what, counted = FAULTS[fault]
    wire = Wire(*plain(), change=answers_but(1, "2", what))
    timeout = ("engine.round_timeout=3",) if fault == "no answer" else ()
    model, metrics, _, summary = run_devices(tmp_path / "devices", wire, "strategy=fedavg", *timeout)
    assert same(model, expected_without(2))
    assert rows_of(metrics, counted) == {1: 0, 2: 1, 3: 0}
    assert summary["failures"] + summary["replies_rejected"] == 1
    assert "round 2: 1 replies did not count; the first: node 1" in capsys.readouterr().out


def test_a_reply_that_says_less_of_its_training_counts_all_the_same(tmp_path):
    def less(message, reply):
        count = reply.content[codec.METRICS]["num-examples"]
        arrays = reply.content[codec.ARRAYS]
        content = RecordDict({codec.ARRAYS: arrays, codec.METRICS: MetricRecord({"num-examples": count})})
        return Message(content, metadata=reply.metadata)

    model, metrics, *_ = run_devices(tmp_path / "devices", Wire(*plain(), change=answers_but(1, "2", less)), "strategy=fedavg")
    assert same(model, expected_without())
    assert b"\n1,global,fit,loss" in metrics
    assert b"\n2,global,fit,loss" not in metrics


def test_a_node_that_is_offline_when_a_round_begins_is_an_absent_node(tmp_path):
    wire = Wire(*plain())

    def leave(k, message, reply):
        wire.offline = {1} if message.metadata.group_id == "1" else set()
        return reply

    wire.change = leave
    model, metrics, *_ = run_devices(tmp_path / "devices", wire, "strategy=fedavg")
    assert same(model, expected_without(2))
    assert rows_of(metrics, "failures") == {1: 0, 2: 1, 3: 0}


def test_a_message_is_not_delivered_after_its_rounds_time_is_up(tmp_path):
    wire = Wire(*plain())
    run_devices(tmp_path / "devices", wire, "strategy=fedavg", "engine.round_timeout=77")
    assert {ttl for _, kind, ttl in wire.log if kind == "train"} == {77.0}


@pytest.mark.parametrize("engine", ["local", "devices"])
def test_fewer_than_min_replies_leave_the_model_as_it_is(tmp_path, capsys, engine):
    """Round 2 has two replies of three: with min_replies=3 it counts as a round and changes nothing."""
    bad = answers_but(1, "2", lambda m, r: with_array(r, Array(first(r).numpy() * np.nan)))
    options = ("strategy=pmfl", "min_replies=3", "num_rounds=2")
    if engine == "devices":
        model, metrics, nodes, summary = run_devices(tmp_path / "two", Wire(*plain(), change=bad), *options)
        one = run_devices(tmp_path / "one", Wire(*plain()), "strategy=pmfl", "min_replies=3", "num_rounds=2")
        assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 3}
        assert not same(model, one[0])
    else:  # node 2 is away in round 2
        trace = tmp_path / "trace.csv"
        trace.write_text("node,round,available\n0,1,1\n1,1,1\n2,1,1\n0,2,1\n1,2,1\n")
        small = [o for o in SMALL if not o.startswith("participation")]
        away = ("participation=trace", f"participation.path={trace}")
        summary = run(config_of(*small, *away, *options, f"output_dir={tmp_path}/two"))
        metrics = (tmp_path / "two" / "metrics.csv").read_bytes()
        assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 2}
    accuracy = {
        int(r["round"]): r["value"]
        for r in csv.DictReader(metrics.decode().splitlines())
        if (r["scope"], r["split"], r["metric"]) == ("global", "test", "loss")
    }
    assert accuracy[1] == accuracy[2] != accuracy[0]
    assert summary["rounds"] == 2
    assert "valid replies, min_replies=3: the model stays as it is" in capsys.readouterr().out


def test_min_replies_is_checked():
    with pytest.raises(UserError, match="min_replies=4 is more than num_nodes=3"):
        deployed("num_nodes=3 min_replies=4 engine=local")


def test_an_evaluation_that_fails_is_counted_and_the_rest_is_averaged(tmp_path, capsys):
    def change(k, message, reply):
        if message.metadata.message_type == "evaluate" and message.metadata.group_id == "3" and k == 0:
            return Message(clients_error(ValueError("no")), reply_to=message)
        if message.metadata.message_type != "evaluate" or message.metadata.group_id != "2" or k == 0:
            return reply
        scores = {"loss": float("nan"), "accuracy": 1.0, "num-examples": 3} if k == 1 else {"loss": 1.0}
        return Message(RecordDict({codec.METRICS: MetricRecord(scores)}), reply_to=message)

    _, metrics, _, _ = run_devices(tmp_path / "run", Wire(*plain(), change=change), "strategy=fedcrl")
    assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 2, 3: 0}
    assert rows_of(metrics, "failures") == {1: 0, 2: 0, 3: 1}
    spread = rows_of(metrics, "accuracy_std")
    assert spread[2] == 0 < spread[1]  # one node is left
    assert "node 1, evaluation: malformed content" in (said := capsys.readouterr().out)
    assert "round 3: 1 replies did not count; the first: node 0, evaluation: " in said


def test_a_node_that_comes_back_under_another_id_is_found_again(tmp_path):
    """Without a key Flower gives a restarted node a new id; the old one is gone for good."""
    wire = Wire(*plain(), {"partition-id": 1}, offline={3})

    def swap(k, message, reply):
        if message.metadata.group_id == "1":
            wire.offline = {1}
        if message.metadata.group_id == "2":
            wire.offline = {1} if k == 2 else wire.offline
        return reply

    wire.change = swap
    model, metrics, *_ = run_devices(tmp_path / "devices", wire, "strategy=fedavg")
    assert rows_of(metrics, "failures") == {1: 0, 2: 0, 3: 0}
    assert {k for k, kind, _ in wire.log if kind == "train"} == {0, 1, 2, 3}
    assert same(model, expected_without())


# ---------------------------------------------------------------------------------------------------------------- the query


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ([{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 1}], "nodes 11 and 12 both say partition-id=1"),
        ([{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 3}], "node 12 cannot take part: partition-id=3 .* 0..2"),
        ([{"partition-id": 0}, {"partition-id": 1}, {}], "node 12 cannot take part: --node-config needs partition-id"),
        (
            [{"partition-id": 0, "statedir": "/x"}, {"partition-id": 1}, {"partition-id": 2}],
            "node 10 .* unknown --node-config key 'statedir', did you mean 'state-dir'",
        ),
        ([{"partition-id": 0, "state-dir": "x"}, {"partition-id": 1}, {"partition-id": 2}], "must be an absolute path, got x"),
        ([{"partition-id": 0, "state-dir": "/proc/x"}, {"partition-id": 1}, {"partition-id": 2}], "node 10 .*/proc/x"),
        ([{"partition-id": 0, "data": "/nothing"}, {"partition-id": 1}, {"partition-id": 2}], "absolute path .*, got /nothing"),
    ],
)
def test_nodes_that_cannot_take_part_are_named_in_one_line(tmp_path, configs, says):
    with pytest.raises(UserError, match=says) as caught:
        run_devices(tmp_path / "run", Wire(*configs), "strategy=fedavg")
    assert "\n" not in str(caught.value)


def test_a_node_whose_data_set_is_not_the_servers_is_refused(tmp_path):
    def change(k, message, reply):
        if message.metadata.message_type == "query" and k == 2:
            counts = list(reply.content[codec.METRICS]["class-counts"])
            reply.content[codec.METRICS]["class-counts"] = [counts[0] + 1, *counts[1:]]
        return reply

    with pytest.raises(UserError, match=r"node 12 \(partition 2\) holds other examples than the partition deals to it"):
        run_devices(tmp_path / "run", Wire(*plain(), change=change), "strategy=fedavg")


ON_NO_DEVICE = ("ray", "hydra", "omegaconf", "matplotlib", "pandas", "tensorboard", "contrafed", "strategies", "simulation")


def test_a_node_imports_none_of_what_only_servers_and_simulations_need():
    """As Flower does it: the ClientApp by its name, here with the query that makes a node's Workspace."""
    settings = {**config_of(*SMALL), "images": {"shape": [1, 8, 8], "num_classes": 10, "mean": [0.5], "std": [0.5]}}
    code = f"""
import json, sys
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
import clients.node.app
assert not [name for name in {ON_NO_DEVICE} if name in sys.modules]
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
content = RecordDict({{"config": ConfigRecord({{"settings": {json.dumps(node_run(settings).to_json())}}})}})
context = Context(1, 10, {{"partition-id": 1}}, RecordDict(), {{}})
reply = clients.node.app.app(Message(content, 10, MessageType.QUERY), context)
assert reply.content["metrics"]["partition-id"] == 1
# scikit-learn, which has the digits, takes pandas.
print([name for name in {ON_NO_DEVICE} if name in sys.modules and name != "pandas"])
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


# ----------------------------------------------------------------------------------------------------------------- own data


def images(path, sizes, side=8, seed=0, split=True):
    """An npz of noise around each class's mean, ``sizes`` examples of each label; every fourth is for testing."""
    rng = np.random.default_rng(seed)
    y = np.repeat(list(sizes), list(sizes.values()))
    x = np.clip(rng.normal(40 * y[:, None, None] + 20, 8, (len(y), side, side)), 0, 255).astype(np.uint8)
    np.savez(path, x=x, y=y, **({"split": np.arange(len(y)) % 4 == 3} if split else {}))
    return x, y


OWN = ("partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=5", "eval_nodes=true")
NO_PARTITION = [o for o in SMALL if not o.startswith("partition.")]


def run_own(folder, wire, *overrides):
    config = deployed(" ".join([*NO_PARTITION, *overrides, f"output_dir={folder}"]))
    serve(DeviceGrid(wire, RUN), config)
    return config, (folder / "metrics.csv").read_bytes(), json.loads((folder / "summary.json").read_text())


def test_nodes_with_data_of_their_own_equal_a_partition_file_of_the_same(tmp_path):
    """Three files of different sizes and labels, none on the server: the sizes that weigh come from the nodes."""
    sizes = [{0: 8, 1: 16}, {2: 12}, {0: 4, 3: 20, 4: 8}]
    x, y = zip(*(images(tmp_path / f"{k}.npz", held, seed=k) for k, held in enumerate(sizes)), strict=True)
    wire = Wire(*plain(data=f"{tmp_path}/{{k}}.npz"))
    config, metrics, _ = run_own(tmp_path / "devices", wire, "strategy=fedavg", *OWN)
    # The same in one place: all images, a partition file of who holds which, and the same normalisation.
    np.savez(tmp_path / "all.npz", x=np.concatenate(x), y=np.concatenate(y), split=np.zeros(sum(map(len, y)), dtype=int))
    ends = np.cumsum([0, *map(len, y)])
    held = [[np.flatnonzero((np.arange(len(part)) % 4 == 3) == test) for part in y] for test in (False, True)]
    lists = [[(indices + ends[k]).tolist() for k, indices in enumerate(part)] for part in held]
    (tmp_path / "parts.json").write_text(json.dumps({"train": lists[0], "test": lists[1]}))
    same_data = ("dataset=npz", f"dataset.path={tmp_path}/all.npz", "dataset.normalize=half", "eval_nodes=true")
    given = ("partition=file", f"partition.path={tmp_path}/parts.json")
    run(config_of("strategy=fedavg", *NO_PARTITION, *same_data, *given, f"output_dir={tmp_path}/local"))
    models = [load_file(tmp_path / f / "model.safetensors") for f in ("devices", "local")]
    assert same(*models)
    local = (tmp_path / "local" / "metrics.csv").read_bytes()
    assert rows_of(metrics, "accuracy_mean") == rows_of(local, "accuracy_mean") != {}
    assert b"global,test," not in metrics  # a server without images scores nothing
    assert b"global,test," in local


def test_one_node_has_its_own_data_and_the_others_a_part_of_the_data_set(tmp_path):
    images(tmp_path / "1.npz", {7: 40, 8: 23})
    configs = plain()
    configs[1]["data"] = f"{tmp_path}/1.npz"
    seen = {}

    def change(k, message, reply):
        if message.metadata.message_type == "train":
            seen[k] = reply.content[codec.METRICS]["num-examples"]
        return reply

    _, metrics, *_ = run_devices(tmp_path / "run", Wire(*configs, change=change), "strategy=fedavg", "eval_train=true")
    assert seen[1] == 48  # of 63, every fourth is for testing
    assert rows_of(metrics, "failures") == {1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize("split", [False, True])
def test_a_folder_of_ones_own_has_empty_folders_for_absent_classes(tmp_path, split):
    for k in range(3):
        for label, name in enumerate("abc"):
            for part in ("train", "test") if split else ("",):
                place = tmp_path / str(k) / part / name
                place.mkdir(parents=True)
                for i in range(0 if label == k else 4 + 2 * k):
                    Image.fromarray(np.full((9, 11), 80 * label + i, dtype=np.uint8)).save(place / f"{i}.png")
    options = ("partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=3")
    seen = {}

    def change(k, message, reply):
        if message.metadata.message_type == "query":
            seen[k] = list(reply.content[codec.METRICS]["class-counts"])
        return reply

    run_own(tmp_path / "run", Wire(*plain(data=f"{tmp_path}/{{k}}"), change=change), "strategy=fedavg", *options)
    held = [4 + 2 * k - (0 if split else round((4 + 2 * k) / 4)) for k in range(3)]
    assert seen == {k: [0 if label == k else held[k] for label in range(3)] for k in range(3)}
    for part in ("train", "test") if split else ("",):
        (tmp_path / "2" / part / "c").rename(tmp_path / "2" / part / "d")
    with pytest.raises(UserError, match=r"\(partition 2\) has classes \['a', 'b', 'd'\]"):
        run_own(tmp_path / "other", Wire(*plain(data=f"{tmp_path}/{{k}}")), "strategy=fedavg", *options)
    for part in ("train", "test") if split else ("",):
        shutil.rmtree(tmp_path / "0" / part / "a")
    with pytest.raises(UserError, match="node 10 cannot take part: .*has 2 classes; this run has 3"):
        run_own(tmp_path / "fewer", Wire(*plain(data=f"{tmp_path}/{{k}}")), "strategy=fedavg", *options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: images(p, {0: 9}, side=9), "images of 1x9x9 .* takes 1x8x8"),
        (lambda p: images(p, {0: 9, 5: 1}), r"labels must be in 0..4, found 0..5"),
        (lambda p: p.write_text("x"), "is no readable npz file"),
        (lambda p: np.savez(p, x=np.zeros((3, 8, 8, 3), np.uint8), y=np.arange(3)), "images of 3x8x8"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_round_1(tmp_path, make, says):
    for k in range(3):
        images(tmp_path / f"{k}.npz", {0: 8, 1: 8})
    make(tmp_path / "1.npz")
    wire = Wire(*plain(data=f"{tmp_path}/{{k}}.npz"))
    with pytest.raises(UserError, match=f"node 11 cannot take part: .*{says}"):
        run_own(tmp_path / "run", wire, "strategy=fedavg", *OWN)
    assert {kind for _, kind, _ in wire.log} == {"query"}


def test_own_data_and_configuration_must_agree(tmp_path):
    with pytest.raises(UserError, match=r"node 10 cannot take part: this run has partition=own: every .* needs data=PATH"):
        run_own(tmp_path / "run", Wire(*plain()), "strategy=fedavg", *OWN)
    with pytest.raises(UserError, match="dataset=own needs dataset.num_classes"):
        deployed("partition=own dataset=own num_nodes=3 engine=local")
    with pytest.raises(UserError, match="it goes with partition=own"):
        deployed("dataset=own num_nodes=3 engine=local")
    with pytest.raises(UserError, match="partition=own goes with flwr run"):
        run(config_of("partition=own", "num_nodes=3", "engine=local"))
    with pytest.raises(UserError, match="partition=own has no partition.keep_fraction"):
        deployed("partition=own partition.keep_fraction=0.5 num_nodes=3 engine=local")


# --------------------------------------------------------------------------------------------------------------------- keys


def test_keys_are_made_once_and_fit_together(tmp_path, capsys):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    assert keys.main([str(tmp_path / "keys"), "--nodes", "1"]) == 2
    assert "--host is missing" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()
    assert keys.main([str(tmp_path / "keys"), "--host", "fl.example.org", "--host", "192.0.2.7", "--nodes", "2"]) == 0
    folder = tmp_path / "keys"
    authority, server = (x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes()) for name in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]
    private = load_ssh_private_key((folder / "node-1").read_bytes(), None)
    assert private.public_key() == load_ssh_public_key((folder / "node-1.pub").read_bytes())
    for name in ("ca.key", "server.key", "node-0", "node-1"):
        assert (folder / name).stat().st_mode & 0o77 == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert keys.main([str(folder), "--nodes", "3"]) == 0
    after = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert after.items() >= before.items()
    assert set(after) - set(before) == {"node-2", "node-2.pub"}
    (folder / "ca.key").unlink()
    assert keys.main([str(folder), "--nodes", "4"]) == 2
    assert "ca.key is not" in capsys.readouterr().err


def test_the_partition_itself_says_its_proportions_unless_nodes_bring_their_own_data():
    """A sampled partition's are what nodes draw from, not what they happened to draw."""
    federation = load_federation(node_run(config_of("partition=sampled", "partition.alpha=0.1", "num_nodes=4")))
    counts = federation.partition.class_counts()
    dealt = Members(np.arange(4), federation, counts, "").class_proportions()
    assert np.array_equal(dealt, federation.partition.class_proportions())
    brought = Members(np.arange(4), federation, counts, "", counts.sum(1), own_data=True).class_proportions()
    assert np.array_equal(brought, counts / 50)
    assert not np.array_equal(dealt, brought)
