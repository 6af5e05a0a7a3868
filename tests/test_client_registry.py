"""Registration of clients: queries before round 1, refused clients, and data that only a client has."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from helpers import config_of, same
from messages import ROOT
from PIL import Image
from safetensors.torch import load_file
from wire import RUN, SMALL_RUN, Wire, answers_but, plain, rows_of, run_devices

from contrafed.core import codec
from contrafed.core.client_run import client_run_of
from contrafed.core.errors import UserError
from contrafed.data.federation import load_federation
from contrafed.engines.client_registry import Members, Registry
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.device_keys import demands_keys
from contrafed.runs.notices import warn_of_large
from contrafed.runs.run import run
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run

pytestmark = pytest.mark.usefixtures("quick_devices")


@pytest.mark.parametrize(
    ("configs", "says"),
    [
        ([{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 1}], "clients 11 and 12 both say partition-id=1"),
        (
            [{"partition-id": 0}, {"partition-id": 1}, {"partition-id": 3}],
            "client of partition 3 cannot .*: partition-id=3 .* 0..2",
        ),
        ([{"partition-id": 0}, {"partition-id": 1}, {}], "client 12 cannot participate: --node-config needs partition-id"),
        ([{"partition-id": "0"}, {"partition-id": 1}, {"partition-id": 2}], "a whole number from 0 without quotes, found '0'"),
        (
            [{"partition-id": 0, "statedir": "/x"}, {"partition-id": 1}, {"partition-id": 2}],
            "client of partition 0 .* unknown --node-config key 'statedir', did you mean 'state-dir'",
        ),
        ([{"partition-id": 0, "state-dir": "x"}, {"partition-id": 1}, {"partition-id": 2}], "must be an absolute path, got x"),
        ([{"partition-id": 0, "state-dir": "/proc/x"}, {"partition-id": 1}, {"partition-id": 2}], "partition 0 .*/proc/x"),
        ([{"partition-id": 0, "data": "/nothing"}, {"partition-id": 1}, {"partition-id": 2}], "absolute path .*, got /nothing"),
    ],
)
def test_clients_that_cannot_take_part_are_named_in_one_line(tmp_path, configs, says):
    with pytest.raises(UserError, match=says) as caught:
        run_devices(tmp_path / "run", Wire(*configs), "strategy=fedavg")
    assert "\n" not in str(caught.value)


def test_a_run_waits_for_its_clients_only_so_long_and_names_those_that_are_missing(tmp_path, capsys):
    configs = [{"partition-id": 0}, {"partition-id": 2}]
    with pytest.raises(UserError, match=r"after 2 s 2 of 3 clients are here; missing: partition 1. Start them, or"):
        run_devices(tmp_path / "run", Wire(*configs), "strategy=fedavg", "wait_for_clients=2")
    assert "waiting for clients: 2 of 3 are here" in capsys.readouterr().out
    many = load_federation(client_run_of(config_of("num_clients=30", "partition.min_client_size=1")))
    registry = Registry(Wire(), many, "", {}, patience=0.1)
    with pytest.raises(UserError, match=r"0 of 30 clients are here; missing: partition 0, 1, .*, 19 and 10 more"):
        registry.wait()


def test_a_client_that_does_not_answer_is_missing(tmp_path):
    wire = Wire(*plain(), change=lambda k, message, reply: None if k == 1 else reply)
    with pytest.raises(UserError, match=r"after 0.5 s 2 of 3 clients are here; missing: partition 1\."):
        run_devices(tmp_path / "run", wire, "strategy=fedavg", "wait_for_clients=0.5")


def test_a_client_whose_data_set_is_not_the_servers_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"client of partition 2 holds other examples than the partition deals to it"):
        run_devices(tmp_path / "run", Wire(*plain(), change=answers_but(2, None, count_one_more, "query")), "strategy=fedavg")


# Packages, and rooms of the framework, that a device imports nothing of.
PACKAGES = ("ray", "hydra", "omegaconf", "matplotlib", "pandas", "tensorboard")
ROOMS = ("server", "engines", "config", "runs", "report", "deploy", "strategies", "command")
NOT_ON_DEVICES = (*PACKAGES, *(f"contrafed.{room}" for room in ROOMS))


def test_a_client_imports_none_of_what_only_servers_and_simulations_need():
    """As Flower does it: the ClientApp by its name, here with the query that makes a client's Workspace."""
    settings = {**config_of(*SMALL_RUN), "images": {"shape": [1, 8, 8], "num_classes": 10, "mean": [0.5], "std": [0.5]}}
    code = f"""
import json, sys
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
import contrafed.client_app.app
assert not [name for name in {NOT_ON_DEVICES} if name in sys.modules]
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
content = RecordDict({{"config": ConfigRecord({{"settings": {json.dumps(client_run_of(settings).to_json())}}})}})
context = Context(1, 10, {{"partition-id": 1}}, RecordDict(), {{}})
reply = contrafed.client_app.app.app(Message(content, 10, MessageType.QUERY), context)
assert reply.content["metrics"]["partition-id"] == 1
# scikit-learn, which has the digits, takes pandas.
print([name for name in {NOT_ON_DEVICES} if name in sys.modules and name != "pandas"])
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stdout + found.stderr


def test_the_partition_itself_says_its_proportions_unless_clients_bring_their_own_data():
    """A sampled partition reports the distributions that clients draw from, not those of their draws."""
    federation = load_federation(client_run_of(config_of("partition=sampled", "partition.alpha=0.1", "num_clients=4")))
    counts = federation.partition.class_counts()
    dealt = Members(np.arange(4), federation, counts, "").class_proportions()
    assert np.array_equal(dealt, federation.partition.class_proportions())
    brought = Members(np.arange(4), federation, counts, "", counts.sum(1), own_data=True).class_proportions()
    assert np.array_equal(brought, counts / 50)
    assert not np.array_equal(dealt, brought)


def images(path, sizes, side=8, seed=0, split=True):
    """Write an npz of noise around each class's mean, with ``sizes`` examples of each label. Every fourth is for testing."""
    rng = np.random.default_rng(seed)
    y = np.repeat(list(sizes), list(sizes.values()))
    x = np.clip(rng.normal(25 * y[:, None, None] + 20, 8, (len(y), side, side)), 0, 255).astype(np.uint8)
    np.savez(path, x=x, y=y, **({"split": np.arange(len(y)) % 4 == 3} if split else {}))
    return x, y


OWN_DATA = ("partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=5", "eval_clients=true")
NO_PARTITION = [o for o in SMALL_RUN if not o.startswith("partition.")]


def run_own(folder, wire, *overrides):
    config = compose_deployed_run(" ".join([*NO_PARTITION, *overrides, f"output_dir={folder}"]))
    serve(DeviceGrid(wire, RUN, config.wait_for_clients), config)
    return config, (folder / "metrics.csv").read_bytes(), json.loads((folder / "summary.json").read_text())


def test_clients_with_data_of_their_own_equal_a_partition_file_of_the_same(tmp_path):
    """Three files of different sizes and labels, none on the server. The sizes for weights come from the clients."""
    sizes = [{0: 8, 1: 16}, {2: 12}, {0: 4, 3: 20, 4: 8}]
    x, y = zip(*(images(tmp_path / f"{k}.npz", held, seed=k) for k, held in enumerate(sizes)), strict=True)
    wire = Wire(*plain(data=f"{tmp_path}/{{k}}.npz"))
    config, metrics, _ = run_own(tmp_path / "devices", wire, "strategy=fedavg", *OWN_DATA)
    # The same in one place: all images, a partition file of who holds which, and the same normalisation.
    np.savez(tmp_path / "all.npz", x=np.concatenate(x), y=np.concatenate(y), split=np.zeros(sum(map(len, y)), dtype=int))
    ends = np.cumsum([0, *map(len, y)])
    held = [[np.flatnonzero((np.arange(len(part)) % 4 == 3) == test) for part in y] for test in (False, True)]
    lists = [[(indices + ends[k]).tolist() for k, indices in enumerate(part)] for part in held]
    (tmp_path / "parts.json").write_text(json.dumps({"train": lists[0], "test": lists[1]}))
    same_data = ("dataset=npz", f"dataset.path={tmp_path}/all.npz", "dataset.normalize=half", "eval_clients=true")
    given = ("partition=file", f"partition.path={tmp_path}/parts.json")
    run(config_of("strategy=fedavg", *NO_PARTITION, *same_data, *given, f"output_dir={tmp_path}/local"))
    assert same(*[load_file(tmp_path / f / "model.safetensors") for f in ("devices", "local")])
    local = (tmp_path / "local" / "metrics.csv").read_bytes()
    assert rows_of(metrics, "accuracy_mean") == rows_of(local, "accuracy_mean") != {}
    assert b"global,test," not in metrics  # a server without images scores nothing
    assert b"global,test," in local


def test_own_data_goes_with_partition_own_alone(tmp_path):
    images(tmp_path / "1.npz", {7: 40, 8: 23})
    configs = plain()
    configs[1]["data"] = f"{tmp_path}/1.npz"
    with pytest.raises(UserError, match=r"^partition: client of partition 1 "):
        run_devices(tmp_path / "run", Wire(*configs), "strategy=fedavg")


def test_a_device_that_says_it_has_too_many_examples_is_refused(tmp_path):
    for k in range(3):
        images(tmp_path / f"{k}.npz", {0: 8, 1: 8})

    def claim(message, reply):
        reply.content[codec.METRICS]["class-counts"] = [2**40, 0, 0, 0, 0]
        return reply

    wire = Wire(*plain(data=f"{tmp_path}/{{k}}.npz"), change=answers_but(1, None, claim, "query"))
    with pytest.raises(UserError, match=r"^partition\.max_examples=1000000: client of partition 1 "):
        run_own(tmp_path / "run", wire, "strategy=fedavg", *OWN_DATA)
    assert {kind for _, kind, _ in wire.log} == {"query"}


def test_a_client_with_most_examples_is_warned_of():
    assert warn_of_large(np.array([5, 90, 5]), own_data=True).startswith("client 1 says that it has 90%")
    assert not warn_of_large(np.array([30, 40, 30]), own_data=True)
    assert not warn_of_large(np.array([5, 90, 5]), own_data=False)


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
    with pytest.raises(UserError, match=r"client of partition 2 has classes \['a', 'b', 'd'\]"):
        run_own(tmp_path / "other", Wire(*plain(data=f"{tmp_path}/{{k}}")), "strategy=fedavg", *options)
    for part in ("train", "test") if split else ("",):
        shutil.rmtree(tmp_path / "0" / part / "a")
    with pytest.raises(UserError, match="client of partition 0 cannot participate: .*has 2 classes; this run has 3"):
        run_own(tmp_path / "fewer", Wire(*plain(data=f"{tmp_path}/{{k}}")), "strategy=fedavg", *options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: images(p, {0: 9}, side=9), "images of 1x9x9 .* takes 1x8x8"),
        (lambda p: images(p, {0: 9, 5: 1}), r"labels must be in 0..4, found 0..5"),
        (lambda p: p.write_text("x"), "not an npz file"),
        (lambda p: np.savez(p, x=np.zeros((3, 8, 8, 3), np.uint8), y=np.arange(3)), "images of 3x8x8"),
    ],
)
def test_data_that_do_not_fit_are_refused_before_round_1(tmp_path, make, says):
    for k in range(3):
        images(tmp_path / f"{k}.npz", {0: 8, 1: 8})
    make(tmp_path / "1.npz")
    wire = Wire(*plain(data=f"{tmp_path}/{{k}}.npz"))
    with pytest.raises(UserError, match=f"client of partition 1 cannot participate: .*{says}"):
        run_own(tmp_path / "run", wire, "strategy=fedavg", *OWN_DATA)
    assert {kind for _, kind, _ in wire.log} == {"query"}


def test_own_data_and_configuration_must_agree(tmp_path):
    with pytest.raises(UserError, match=r"client of partition 0 cannot .* has partition=own: every .* needs data=PATH"):
        run_own(tmp_path / "run", Wire(*plain()), "strategy=fedavg", *OWN_DATA)
    with pytest.raises(UserError, match="partition=own goes with flwr run"):
        run(config_of("partition=own", "num_clients=3", "engine=local"))


KEYS = [b"key 0", b"key 1", b"key 2", b"key 3"]


def swap_client(wire):
    """Have client 1 go away in round 1, and client 3, which claims the same partition, join."""

    def change(k, message, reply):
        if message.metadata.group_id == "1":
            wire.offline = {1}
        return reply

    wire.change = change
    return wire


@pytest.mark.parametrize("keys", [KEYS, ()], ids=["keys", "no keys"])
def test_another_key_does_not_get_the_partition_of_a_client_that_is_away(tmp_path, capsys, keys):
    wire = swap_client(Wire(*plain(), {"partition-id": 1}, offline={3}, keys=keys))
    _, metrics, *_ = run_devices(tmp_path / "run", wire, "strategy=fedavg")
    lines = [line for line in capsys.readouterr().out.splitlines() if "client of partition 1 says partition-id=1, " in line]
    trained = {k for k, kind, _ in wire.log if kind == "train"}
    assert (3 in trained, bool(lines)) == (not keys, bool(keys))
    assert rows_of(metrics, "failures")[3] == (1 if keys else 0)


def register_on(wire, own=None, patience=5.0):
    """Ask the three clients of ``wire`` for their partitions, and return the grid."""
    run = compose_deployed_run(" ".join([*SMALL_RUN, "strategy=fedavg"]))
    grid = DeviceGrid(wire, RUN, patience)
    grid.begin(False, own or {})
    grid.members(run.client, load_federation(run.client), {})
    return grid


def register(*keys, own=None):
    """Ask three clients for their partitions, and return what a checkpoint keeps of the grid."""
    return json.loads(json.dumps(register_on(Wire(*plain(), keys=keys), own).own(1)))


@pytest.fixture
def earlier_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return register(*KEYS[:3])


def test_a_resumed_run_knows_its_clients_by_their_keys(earlier_state):
    register(*KEYS[:3], own=earlier_state)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([KEYS[1], KEYS[0], KEYS[2]], "client of partition 0 says partition-id=0, .* Fix: partition-id=1 in"),
        ([KEYS[0], KEYS[1], KEYS[3]], "client of partition 2 says partition-id=2, .* another key"),
    ],
    ids=["a key changes its partition", "another key claims a partition"],
)
def test_a_resumed_run_refuses_a_key_with_another_partition(earlier_state, keys, says):
    with pytest.raises(UserError, match=says) as caught:
        register(*keys, own=earlier_state)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_keys_binds_those_that_come(earlier_state):
    earlier_state["clients"] = [row[:5] for row in earlier_state["clients"]]
    assert [row[5] for row in register(*KEYS[:3], own=earlier_state)["clients"]] == [
        row[5] for row in register(*KEYS[:3])["clients"]
    ]


def test_a_grid_that_does_not_say_whether_there_are_keys_is_refused():
    with pytest.raises(UserError, match="SuperNodes have keys"):
        demands_keys(SimpleNamespace())


def refuse(message, reply):
    """Return what a device with a full disk answers."""
    return Message(RecordDict({codec.CONFIG: ConfigRecord({"refused": "no space left on device"})}), reply_to=message)


def end_by_signal(message, reply):
    return Message(Error(ErrorCode.CLIENT_APP_CRASHED, "ClientApp exited with code -9"), reply_to=message)


def count_one_more(message, reply):
    counts = list(reply.content[codec.METRICS]["class-counts"])
    reply.content[codec.METRICS]["class-counts"] = [counts[0] + 1, *counts[1:]]
    return reply


def client_comes_back(tmp_path, monkeypatch, fault):
    """Register three clients. Client 1 goes, and client 3, which takes its place, has a fault in its first answer."""
    monkeypatch.chdir(tmp_path)
    faults, wire = [fault], Wire(*plain(), {"partition-id": 1}, offline={3})
    grid = register_on(wire)
    wire.change = lambda k, message, reply: faults.pop()(message, reply) if k == 3 and faults else reply
    wire.offline = {1}
    assert len(grid.newcomers()) == 1
    assert not faults
    return grid, wire


@pytest.mark.parametrize("fault", [refuse, end_by_signal])
def test_a_device_with_a_passing_fault_is_asked_again(tmp_path, monkeypatch, fault):
    grid, _ = client_comes_back(tmp_path, monkeypatch, fault)
    assert grid.newcomers() == ["client of partition 1 is back, under another id"]


def test_a_device_that_was_away_is_asked_again(tmp_path, monkeypatch):
    """It had other data, and was restarted with the right ones. Its key gives it the same id."""
    grid, wire = client_comes_back(tmp_path, monkeypatch, count_one_more)
    assert [grid.newcomers() for _ in range(5)] == [[]] * 5
    wire.offline = {1, 3}
    assert grid.newcomers() == []
    wire.offline = {1}
    assert grid.newcomers() == ["client of partition 1 is back, under another id"]
    asked = len(wire.log)
    wire.offline = {1, 3}
    assert grid.newcomers() == []
    wire.offline = {1}
    assert grid.newcomers() == []  # it has its partition already
    assert len(wire.log) == asked


def test_a_device_that_disconnects_before_its_key_is_read_is_not_bound_without_one(tmp_path, monkeypatch, earlier_state):
    wire = Wire(*plain(), keys=KEYS[:3])
    get_nodes, calls = wire.get_nodes, []

    def without_client_1():
        calls.append(1)
        return [node for node in get_nodes() if len(calls) > 1 or node.node_id != 11]

    wire.get_nodes = without_client_1
    assert sorted(register_on(wire).own(1)["clients"]) == sorted(earlier_state["clients"])
