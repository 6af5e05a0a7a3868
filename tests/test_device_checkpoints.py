"""A stopped run of devices resumes: the server from its checkpoint, clients from the files on their disks."""

import json
import os
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from helpers import config_of, same, slow
from safetensors.torch import load_file
from stopped import outcome
from wire import RUN, SMALL_RUN, Wire, answers_but, plain, rows_of, run_devices

from contrafed.client_app.files import ClientStateError, Moment, StateDir
from contrafed.core.errors import UserError
from contrafed.engines.device_grid import DeviceGrid
from contrafed.runs import checkpoint
from contrafed.runs.run import run
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run
from contrafed.training.workspace import uninstall

pytestmark = pytest.mark.usefixtures("quick_devices")

LONG_RUN = ("num_rounds=5", "checkpoint_every=2")
SECOND_RUN_ID = RUN + 1  # Flower's id of the second attempt


class Stopped(BaseException):
    """The exception that ends a server silently."""


def clients(folder, run_id, change=None, **more):
    return Wire(*plain(**{"state-dir": f"{folder}/state{{k}}", **more}), change=change, run_id=run_id)


def stop_in(server_round, kind="train", client=1):
    """End the server while it waits for a client's reply. Clients that were asked before have trained."""

    def stop(message, reply):
        raise Stopped

    return answers_but(client, str(server_round), stop, kind)


def run_until_stopped(folder, *overrides, run_id=RUN, change=None):
    """Run an attempt that ends in round 4, after the checkpoint of round 2. All clients have trained since that checkpoint."""
    with pytest.raises(Stopped):
        run_devices(folder / "run", clients(folder, run_id, change or stop_in(4)), *LONG_RUN, *overrides)


def go_on(folder, *overrides, run_id=SECOND_RUN_ID):
    """Run the next attempt to its end."""
    return run_devices(folder / "run", clients(folder, run_id), *LONG_RUN, *overrides, "resume=latest")


def memory_of(folder, k, run_id=RUN):
    return load_file(folder / f"state{k}" / "client_state" / f"{run_id}-{k}.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the results of each method's uninterrupted run."""

    @cache
    def get(name):
        folder = tmp_path_factory.mktemp(name) / "local"
        run(config_of(f"strategy={name}", *SMALL_RUN, "num_rounds=5", f"output_dir={folder}"))
        return outcome(folder)

    return get


@pytest.mark.parametrize("name", ["pmfl", slow("fedcrl")])
def test_a_stopped_run_of_devices_ends_with_the_bytes_of_local(tmp_path, whole, name):
    """Clients 0 and 1 had trained in round 4 and return to round 2."""
    # The result is that of a first attempt stopped at round 2.
    run_until_stopped(tmp_path, f"strategy={name}")
    assert checkpoint.find(tmp_path / "run").server_round == 2
    *found, summary = go_on(tmp_path, f"strategy={name}")
    model, metrics, by_client = whole(name)
    assert same(found[0], model)
    assert (found[1], found[2]) == (metrics, by_client)
    assert summary["resumed_from"].endswith("000002")
    files = sorted(path.name for path in (tmp_path / "state0" / "client_state").iterdir())
    assert files == [f"{RUN}-0.kept", f"{RUN}-0.safetensors"]  # stored under the first attempt's id


@pytest.mark.parametrize("where", [slow((3, "train")), slow((3, "evaluate")), (5, "evaluate")])
def test_wherever_it_stops_and_however_often(tmp_path, whole, where):
    """A second attempt stops before it has a checkpoint, or after the last evaluation, which ends the client states."""
    run_until_stopped(tmp_path, "strategy=fedcrl")
    with pytest.raises(Stopped):
        second = clients(tmp_path, SECOND_RUN_ID, stop_in(*where))
        run_devices(tmp_path / "run", second, *LONG_RUN, "strategy=fedcrl", "resume=latest")
    model, metrics, *_ = go_on(tmp_path, "strategy=fedcrl", run_id=SECOND_RUN_ID + 1)
    assert same(model, whole("fedcrl")[0])
    assert metrics == whole("fedcrl")[1]


def test_a_run_that_stopped_before_its_first_checkpoint_begins_anew(tmp_path, whole, capsys):
    run_until_stopped(tmp_path, "strategy=pmfl", "checkpoint_every=5", change=stop_in(3))
    assert memory_of(tmp_path, 0)["participations"] == 3
    found = go_on(tmp_path, "checkpoint_every=5", "strategy=pmfl")
    assert "beginning with round 1" in capsys.readouterr().out
    assert same(found[0], whole("pmfl")[0])
    assert found[1] == whole("pmfl")[1]
    assert memory_of(tmp_path, 0, SECOND_RUN_ID)["participations"] == 5


def remove_state(state):
    shutil.rmtree(state)


def without_kept(state):
    (state / "client_state" / f"{RUN}-1.kept").unlink()


def damaged_kept(state):
    path = state / "client_state" / f"{RUN}-1.kept"
    path.write_bytes(path.read_bytes()[:-10])


def of_long_ago(state):
    """Restore an old copy of a disk."""
    path = state / "client_state" / f"{RUN}-1.kept"
    tensors, _ = StateDir(state, str(RUN), 1, "pmfl")._read(path)
    path.unlink()
    StateDir(state, str(RUN), 1, "pmfl").write(tensors, Moment(str(RUN), 1))


def test_a_lost_memory_is_told_also_where_the_reply_does_not_count(tmp_path, capsys):
    how = ("strategy=pmfl", "engine.max_norm=1e-9")
    run_until_stopped(tmp_path, *how)
    remove_state(tmp_path / "state1")
    *_, metrics, _, summary = go_on(tmp_path, *how)
    assert summary["replies_rejected"] > 0
    assert rows_of(metrics, "state_lost") == {3: 1}
    assert "round 3: client 1 begins with an empty client state: " in capsys.readouterr().out


def test_a_damaged_newer_file_does_not_hide_the_one_that_a_resumed_run_needs(tmp_path, whole):
    """Client 1 had trained after the checkpoint. The resumed run goes back to the file of the checkpoint."""
    run_until_stopped(tmp_path, "strategy=pmfl")
    path = tmp_path / "state1" / "client_state" / f"{RUN}-1.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    model, metrics, *_ = go_on(tmp_path, "strategy=pmfl")
    assert same(model, whole("pmfl")[0])
    assert metrics == whole("pmfl")[1]


@pytest.mark.parametrize("damage", [remove_state, slow(without_kept), damaged_kept, slow(of_long_ago)])
def test_a_client_that_cannot_go_back_says_so_and_begins_anew(tmp_path, capsys, damage):
    run_until_stopped(tmp_path, "strategy=pmfl")
    damage(tmp_path / "state1")
    *_, metrics, _, summary = go_on(tmp_path, "strategy=pmfl")
    assert rows_of(metrics, "state_lost") == {3: 1}
    assert "round 3: client 1 begins with an empty client state: " in capsys.readouterr().out
    assert [int(memory_of(tmp_path, k)["participations"]) for k in range(3)] == [5, 3, 5]
    assert summary["failures"] == 0


def test_a_resumed_run_refuses_a_device_whose_own_images_changed(tmp_path, expect_error):
    """The labels and their counts are the same."""
    rng = np.random.default_rng(0)
    for k in range(3):
        np.savez(tmp_path / f"{k}.npz", x=rng.integers(0, 256, (40, 8, 8), np.uint8), y=np.arange(40) % 10)
    before = np.load(tmp_path / "1.npz")
    small = [o for o in SMALL_RUN if not o.startswith("partition.")]
    own = [*small, *LONG_RUN, "strategy=fedavg", "partition=own", "dataset=own", "dataset.height=8", "dataset.width=8"]
    overrides = " ".join([*own, "dataset.num_classes=10", f"output_dir={tmp_path}/run"])

    def attempt(run_id, *resume, change=None):
        uninstall()  # a device loads its data anew for every message
        wire = clients(tmp_path, run_id, change, data=f"{tmp_path}/{{k}}.npz")
        serve(DeviceGrid(wire, run_id, 5.0), compose_deployed_run(" ".join([overrides, *resume])))

    with pytest.raises(Stopped):
        attempt(RUN, change=stop_in(4))
    np.savez(tmp_path / "1.npz", x=255 - before["x"], y=before["y"])
    with expect_error():
        attempt(SECOND_RUN_ID, "resume=latest")
    np.savez(tmp_path / "1.npz", **before)
    attempt(SECOND_RUN_ID, "resume=latest")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"


def test_a_device_whose_own_images_change_during_the_run_fails(tmp_path):
    """The labels and their counts are the same."""
    rng = np.random.default_rng(0)
    for k in range(3):
        np.savez(tmp_path / f"{k}.npz", x=rng.integers(0, 256, (40, 8, 8), np.uint8), y=np.arange(40) % 10)

    def change(k, message, reply):
        if (k, message.metadata.message_type, message.metadata.group_id) == (0, "train", "2"):
            np.savez(tmp_path / "1.npz", x=rng.integers(0, 256, (40, 8, 8), np.uint8), y=np.arange(40) % 10)
            uninstall()  # a device loads its data anew for every message
        return reply

    small = [o for o in SMALL_RUN if not o.startswith("partition.")]
    own = [*small, "partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=10"]
    overrides = [*own, "strategy=fedavg", "num_rounds=4", "checkpoint_every=1", f"output_dir={tmp_path}/run"]
    wire = clients(tmp_path, RUN, change, data=f"{tmp_path}/{{k}}.npz")
    serve(DeviceGrid(wire, RUN, 5.0), compose_deployed_run(" ".join(overrides)))
    assert rows_of((tmp_path / "run" / "metrics.csv").read_bytes(), "failures") == {1: 0, 2: 0, 3: 1, 4: 1}


def test_another_run_on_the_same_devices_leaves_their_state(tmp_path):
    """Refused after its query, or trained: neither removes the client state of a run that has checkpoints."""
    run_until_stopped(tmp_path, "strategy=pmfl")
    before = [memory_of(tmp_path, k) for k in range(3)]
    with pytest.raises(UserError):  # a typo in the number of clients
        run_devices(tmp_path / "typo", clients(tmp_path, 77), *LONG_RUN, "strategy=pmfl", "num_clients=2")
    assert all(same(memory_of(tmp_path, k), before[k]) for k in range(3))
    run_devices(tmp_path / "other", clients(tmp_path, 78), *LONG_RUN, "strategy=pmfl", "num_rounds=1")
    *_, metrics, _, summary = go_on(tmp_path, "strategy=pmfl")
    assert "state_lost" not in metrics.decode()
    assert summary["failures"] == 0


def test_state_that_no_run_changes_is_removed_when_another_trains(tmp_path):
    old, new = StateDir(tmp_path, "1", 0, "pmfl"), StateDir(tmp_path, "2", 0, "pmfl")
    old.open()
    old.state_file.write_bytes(b"")
    new.remove_stale()
    assert old.state_file.exists()
    os.utime(old.state_file, (0, 0))
    new.open()
    assert old.state_file.exists()
    (folder := old.state_file.parent / "lost+found").mkdir()
    os.utime(folder, (0, 0))
    new.remove_stale()
    assert not old.state_file.exists()
    assert folder.is_dir()


def test_a_client_that_left_for_good_does_not_hold_up_a_resumed_run(tmp_path, capsys):
    """Clients 1 and 2 are absent when the run resumes. Client 1 returns after round 3 with another id, and 2 never."""
    run_until_stopped(tmp_path, "strategy=pmfl")
    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}), run_id=SECOND_RUN_ID)
    wire.contexts.append(Context(SECOND_RUN_ID, 13, dict(wire.contexts[1].node_config), RecordDict(), {}))
    wire.offline = {1, 2, 3}

    def back(k, message, reply):
        wire.offline = {1, 2} if message.metadata.group_id == "3" else wire.offline
        return reply

    wire.change = back
    how = (*LONG_RUN, "strategy=pmfl", "resume=latest", "wait_for_clients=2")
    _, metrics, _, summary = run_devices(tmp_path / "run", wire, *how)
    said = capsys.readouterr().out
    assert "after 2 s 1 of 3 clients are here; missing: partition 1, 2. They count as absent until they are back" in said
    assert "client of partition 1 is back" in said
    assert {n: c for n, c in rows_of(metrics, "failures").items() if n > 2} == {3: 2, 4: 1, 5: 1}
    assert not any(rows_of(metrics, "state_lost").values())
    assert [int(memory_of(tmp_path, k)["participations"]) for k in range(2)] == [5, 4]
    assert (summary["status"], summary["rounds"]) == ("finished", 5)
    # Nor does it wait for ever if no client is available.
    with pytest.raises(UserError, match=r"after 0.2 s 0 of 3 clients are here; missing: partition 0, 1, 2. Start them, or"):
        run_devices(tmp_path / "run", Wire(run_id=SECOND_RUN_ID + 1), *how, "wait_for_clients=0.2")


def test_two_runs_that_go_on_from_the_same_checkpoint_do_not_mix(tmp_path, capsys):
    """The clients' disks hold the last attempt's state. The other branch finds nothing and reports so."""
    run_until_stopped(tmp_path, "strategy=pmfl")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    go_on(tmp_path, "strategy=pmfl")
    branch = clients(tmp_path, SECOND_RUN_ID + 1)
    _, metrics, *_ = run_devices(tmp_path / "copy", branch, *LONG_RUN, "strategy=pmfl", "resume=latest")
    assert rows_of(metrics, "state_lost") == {3: 3}


def test_without_state_dir_it_is_refused_where_clients_remember(tmp_path):
    with pytest.raises(UserError, match="cannot participate: checkpoint_every and resume: --node-config needs state-dir"):
        run_devices(tmp_path / "a", Wire(*plain()), *LONG_RUN, "strategy=pmfl")
    *_, summary = run_devices(tmp_path / "b", Wire(*plain()), *LONG_RUN, "strategy=fedavg")
    assert summary["status"] == "finished"


def test_a_process_that_forgets_without_state_dir_is_told_of(tmp_path, capsys):
    wire = Wire(*plain())

    def forget(k, message, reply):
        if k == 1 and message.metadata.group_id == "1" and message.metadata.message_type == "train":
            wire.contexts[1].state.clear()
        return reply

    wire.change = forget
    _, metrics, *_ = run_devices(tmp_path / "run", wire, "strategy=pmfl")
    assert rows_of(metrics, "state_lost") == {2: 1}
    assert "ended with its process, because it has no state-dir" in capsys.readouterr().out


def test_checkpoints_of_devices_and_of_simulations_are_told_apart(tmp_path):
    run_until_stopped(tmp_path, "strategy=pmfl")
    stored = json.loads((tmp_path / "run" / "checkpoints" / "000002" / "state.json").read_text())["config"]
    with pytest.raises(UserError, match="the client state of .*000002 is on devices"):
        run({**stored, "resume": "latest", "output_dir": str(tmp_path / "run")})
    run({**stored, "output_dir": str(tmp_path / "local")})
    with pytest.raises(UserError, match="is in the checkpoint"):
        again = clients(tmp_path, SECOND_RUN_ID)
        run_devices(tmp_path / "b", again, *LONG_RUN, "strategy=pmfl", f"resume={tmp_path}/local")


def moment(sitting, server_round, checkpoint=None, known=0, **past):
    return Moment(sitting, server_round, {name.lstrip("s"): t for name, t in past.items()}, checkpoint, known)


def tensors(value):
    return {"a": torch.full((3,), float(value))}


def test_what_a_client_keeps_is_what_it_remembered_at_the_last_checkpoint(tmp_path):
    state = StateDir(tmp_path, "1", 0, "pmfl")
    for server_round, last in ((3, 0), (4, 0), (8, 5), (9, 5), (14, 10)):
        state.write(tensors(server_round), moment("1", server_round, last))
    assert same(state.read(moment("1", 15)), tensors(14))
    assert same(state.read(moment("2", 11, 10, s1=10)), tensors(9))
    assert same(state.read(moment("2", 15, 14, s1=14)), tensors(14))
    with pytest.raises(
        ClientStateError, match="of round 4 is not there"
    ):  # told of a newer checkpoint, it forgot that of round 5
        state.read(moment("2", 6, 5, 4, s1=5))
    # The second attempt resumes from round 10 and stops before a checkpoint. So does the third.
    for sitting in ("2", "3"):
        state.write(tensors(int(sitting) * 100), moment(sitting, 11, 10, s1=10))
        assert same(state.read(moment("4", 11, 10, s1=10)), tensors(9))
    # The work of an abandoned attempt is never kept for another.
    state.write(tensors(5), moment("5", 12, 10, s1=10))
    assert same(state.read(moment("6", 12, 10, s1=10)), tensors(9))


def test_a_client_that_trained_first_after_the_checkpoint_goes_back_to_nothing(tmp_path):
    state = StateDir(tmp_path, "1", 0, "pmfl")
    state.write(tensors(12), moment("1", 12, 10))
    assert state.read(moment("2", 11, 10, s1=10)) == {}
