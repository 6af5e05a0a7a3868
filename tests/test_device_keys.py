"""A SuperNode's key is bound to its partition, where the SuperLink demands registered keys."""

import json
from types import SimpleNamespace

import pytest
from wire import RUN, SMALL_RUN, Wire, plain, rows_of, run_devices

from contrafed.core.errors import UserError
from contrafed.data.federation import load_federation
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.device_keys import demands_keys
from contrafed.runs.setup import compose_deployed_run

pytestmark = pytest.mark.usefixtures("quick_devices")
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
    lines = [line for line in capsys.readouterr().out.splitlines() if "client 13 says partition-id=1, " in line]
    trained = {k for k, kind, _ in wire.log if kind == "train"}
    assert (3 in trained, bool(lines)) == (not keys, bool(keys))
    assert rows_of(metrics, "failures")[3] == (1 if keys else 0)


def register(*keys, own=None):
    """Ask three clients for their partitions, and return what a checkpoint keeps of the grid."""
    run = compose_deployed_run(" ".join([*SMALL_RUN, "strategy=fedavg"]))
    grid = DeviceGrid(Wire(*plain(), keys=keys), RUN, 5.0)
    grid.begin(False, own or {})
    grid.members(run.client, load_federation(run.client), {})
    return json.loads(json.dumps(grid.own(1)))


@pytest.fixture
def known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return register(*KEYS[:3])


def test_a_resumed_run_knows_its_clients_by_their_keys(known):
    register(*KEYS[:3], own=known)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([KEYS[1], KEYS[0], KEYS[2]], "client 10 says partition-id=0, .* Fix: partition-id=1 in"),
        ([KEYS[0], KEYS[1], KEYS[3]], "client 12 says partition-id=2, .* another key"),
    ],
    ids=["a key changes its partition", "another key claims a partition"],
)
def test_a_resumed_run_refuses_a_key_with_another_partition(known, keys, says):
    with pytest.raises(UserError, match=says) as caught:
        register(*keys, own=known)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_keys_binds_those_that_come(known):
    known["clients"] = [row[:5] for row in known["clients"]]
    assert [row[5] for row in register(*KEYS[:3], own=known)["clients"]] == [row[5] for row in register(*KEYS[:3])["clients"]]


def test_a_grid_that_does_not_say_whether_there_are_keys_is_refused():
    with pytest.raises(UserError, match="SuperNodes have keys"):
        demands_keys(SimpleNamespace())
