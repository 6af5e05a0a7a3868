"""Behaviour of devices in one process: client state on disk, absences, and invalid replies."""

import csv
import functools
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from helpers import config_of, same, slow
from safetensors.torch import load_file, save_file
from wire import RUN, SMALL_RUN, Wire, answers_but, clients_error, plain, rows_of, run_devices

import contrafed.client_app.app
from contrafed.client_app.files import ClientStateError, Moment, StateDir
from contrafed.core import codec
from contrafed.core.errors import UserError
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.worker import identify
from contrafed.runs.run import run
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run

pytestmark = pytest.mark.usefixtures("quick_devices")
# Where a run stands after round 2.
CURRENT_MOMENT = Moment(str(RUN), 2)


@pytest.mark.parametrize("name", [slow("pmfl"), "fedcrl", slow("moon"), slow("fedper")])
def test_a_client_that_is_another_process_at_every_message_equals_local(tmp_path, name):
    """Nothing in Context.state persists here, so the client state is that of the state-dir."""
    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}))

    def forget(k, message, reply):
        assert not wire.contexts[k].state
        return reply

    wire.change = forget
    adam = ("strategy.local.keep_optimizer=true", "strategy.local.optimizer=adam", "strategy.local.momentum=0")
    keep = adam if name == "moon" else ()
    model, metrics, clients, _ = run_devices(tmp_path / "devices", wire, f"strategy={name}", *keep)
    local = run(config_of(f"strategy={name}", *SMALL_RUN, *keep, f"output_dir={tmp_path}/local"))
    assert same(model, load_file(tmp_path / "local" / "model.safetensors"))
    assert metrics == (tmp_path / "local" / "metrics.csv").read_bytes()
    assert clients == (tmp_path / "local" / "clients.csv").read_bytes()
    assert local["failures"] == 0


def test_memory_ends_with_the_run_and_another_runs_is_never_used(tmp_path):
    state = tmp_path / "state0" / "client_state"
    run_devices(tmp_path / "a", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=fedcrl")
    assert list(state.iterdir()) == []  # the last evaluation said that it is the last
    run_devices(tmp_path / "b", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=pmfl")
    assert [p.name for p in state.iterdir()] == [f"{RUN}-0.safetensors"]  # PMFL's clients are not asked to evaluate
    rounds = load_file(state / f"{RUN}-0.safetensors")["participations"]
    assert rounds == 3
    (state / f"{RUN}-0.safetensors").rename(state / "77-0.safetensors")
    run_devices(tmp_path / "c", Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"})), "strategy=pmfl")
    assert sorted(p.name for p in state.iterdir()) == [f"{RUN}-0.safetensors", "77-0.safetensors"]
    assert load_file(state / f"{RUN}-0.safetensors")["participations"] == rounds


def truncate_file(path):
    path.write_bytes(path.read_bytes()[:-100])


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def other_run(path):
    StateDir(path.parent.parent, "7", 1, "pmfl").write({"a": torch.zeros(1)}, Moment("7", 2))
    (path.parent / "7-1.safetensors").rename(path)


def other_shape(path):
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith("previous/"))
    StateDir(path.parent.parent, str(RUN), 1, "pmfl").write(tensors | {name: torch.zeros(3, 3)}, CURRENT_MOMENT)


def less(path):
    tensors = load_file(path)
    StateDir(path.parent.parent, str(RUN), 1, "pmfl").write(
        {n: t for n, t in tensors.items() if n != "num_pushed"}, CURRENT_MOMENT
    )


def foreign(path):
    save_file({"x": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate_file, "is damaged"), (one_bit, "checksum"), (other_run, "of another run"), (other_shape, "has shape (3, 3)"),
        (less, "num_pushed is missing"), (foreign, "of another run: None"),
    ],
)  # fmt: skip
def test_a_memory_that_is_not_whole_is_reported_and_begins_anew(tmp_path, capsys, damage, says):
    path = tmp_path / "state1" / "client_state" / f"{RUN}-1.safetensors"

    def hit(k, message, reply):
        if k == 1 and message.metadata.group_id == "2" and message.metadata.message_type == "train":
            damage(path)  # after round 2's training: found in round 3
        return reply

    wire = Wire(*plain(**{"state-dir": f"{tmp_path}/state{{k}}"}), change=hit)
    _, metrics, _, summary = run_devices(tmp_path / "run", wire, "strategy=pmfl")
    assert rows_of(metrics, "state_lost") == {3: 1}
    assert "round 3: client 1 begins with an empty client state" in (said := capsys.readouterr().out)
    assert says in said
    assert load_file(path)["participations"] == 1
    assert load_file(tmp_path / "state0" / "client_state" / f"{RUN}-0.safetensors")["participations"] == 3
    assert summary["failures"] == summary["replies_rejected"] == 0


def test_a_crash_while_memory_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    state = StateDir(tmp_path, "1", 0, "pmfl")
    state.write({"a": torch.ones(2), "count": torch.tensor(3)}, Moment("1"))

    def crash(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        state.write({"a": torch.zeros(2)}, Moment("1"))
    found = state.read(Moment("1"))
    assert torch.equal(found["a"], torch.ones(2))
    assert found["count"] == 3
    with pytest.raises(ClientStateError, match="of another method: pmfl, not moon"):
        StateDir(tmp_path, "1", 0, "moon").read(Moment("1"))


def test_personal_models_stay_below_the_clients_own_folder(tmp_path, monkeypatch):
    """The server names a run, never a path. A saved model is found again by that name."""
    state = {"state-dir": f"{tmp_path}/state{{k}}"}
    *_, summary = run_devices(tmp_path / "run", Wire(*plain(**state)), "strategy=fedcrl", "save_personal=true")
    assert (summary["engine"], summary["run_id"]) == ("devices", str(RUN))
    assert not (tmp_path / "run" / "personal").exists()
    for k in range(3):
        assert [p.name for p in (tmp_path / f"state{k}" / "personal" / str(RUN)).iterdir()] == [f"{k}.safetensors"]
    config = compose_deployed_run(f"evaluate_only={tmp_path}/run engine=local output_dir={tmp_path}/again")
    serve(DeviceGrid(Wire(*plain(**state)), 99), config)
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["personal_accuracy_mean"] == summary["personal_accuracy_mean"]
    with pytest.raises(UserError, match="client of partition 0 cannot participate: --node-config needs state-dir"):
        run_devices(tmp_path / "none", Wire(*plain()), "strategy=fedcrl", "save_personal=true")
    # A device never writes to a path from a message.
    identify()
    context = Context(RUN, 10, plain(**state)[0], RecordDict(), {})
    places = contrafed.client_app.app._resolve_personal_paths(
        {"save": "/etc"}, context, StateDir(tmp_path / "state0", str(RUN), 0, "fedcrl")
    )
    assert places == {"save": f"{tmp_path}/state0/personal/{RUN}"}


@functools.cache
def expected_without(*rounds):
    """Return the same run with client 1 absent in ``rounds``."""
    # FedAvg has no client state, so an absent client equals a rejected one.
    with tempfile.TemporaryDirectory() as folder:
        return _without(Path(folder), rounds)


def _without(folder, rounds):
    trace = folder / "trace.csv"
    lines = [f"{k},{t},{int(not (k == 1 and t in rounds))}" for k in range(3) for t in (1, 2, 3)]
    trace.write_text("client,round,available\n" + "\n".join(lines) + "\n")
    small = [o for o in SMALL_RUN if not o.startswith("participation")]
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
    """Return the first array under a .npy header that claims another shape than Flower's does."""
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


# Each has its like among the others.
SLOW_FAULTS = ("claims 2 PB", "more bytes than it says", "no array format", "another message", "error")


@pytest.mark.parametrize("fault", [slow(fault) if fault in SLOW_FAULTS else fault for fault in FAULTS])
def test_a_bad_reply_costs_only_itself(tmp_path, capsys, fault):
    what, counted = FAULTS[fault]
    wire = Wire(*plain(), change=answers_but(1, "2", what))
    timeout = ("engine.round_timeout=3",) if fault == "no answer" else ()
    model, metrics, _, summary = run_devices(tmp_path / "devices", wire, "strategy=fedavg", *timeout)
    assert same(model, expected_without(2))
    assert rows_of(metrics, counted) == {1: 0, 2: 1, 3: 0}
    assert summary["failures"] + summary["replies_rejected"] == 1
    words = {"failures": "1 client failed", "replies_rejected": "1 reply was rejected"}
    assert f"round 2: {words[counted]}; the first: client 1" in capsys.readouterr().out


def test_a_reply_that_says_less_of_its_training_counts_all_the_same(tmp_path):
    """The round's loss is then that of the others."""
    others = []

    def less(k, message, reply):
        about = message.metadata
        if (about.message_type, about.group_id) != ("train", "2"):
            return reply
        count = reply.content[codec.METRICS]["num-examples"]
        if k != 1:
            others.append((count, reply.content[codec.METRICS]["loss"]))
            return reply
        arrays = reply.content[codec.ARRAYS]
        content = RecordDict({codec.ARRAYS: arrays, codec.METRICS: MetricRecord({"num-examples": count})})
        return Message(content, metadata=reply.metadata)

    model, metrics, *_ = run_devices(tmp_path / "devices", Wire(*plain(), change=less), "strategy=fedavg")
    assert same(model, expected_without())
    (found,) = re.findall(rb"\n2,global,fit,loss,(\S+)", metrics)
    assert len(others) == 2
    assert float(found) == pytest.approx(sum(n * loss for n, loss in others) / sum(n for n, _ in others), rel=1e-5)


def test_a_client_that_is_offline_when_a_round_begins_is_an_absent_client(tmp_path):
    wire = Wire(*plain())

    def leave(k, message, reply):
        wire.offline = {1} if message.metadata.group_id == "1" else set()
        return reply

    wire.change = leave
    model, metrics, *_ = run_devices(tmp_path / "devices", wire, "strategy=fedavg")
    assert same(model, expected_without(2))
    assert rows_of(metrics, "failures") == {1: 0, 2: 1, 3: 0}
    assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 0, 3: 0}


def test_a_message_is_not_delivered_after_its_rounds_time_is_up(tmp_path):
    wire = Wire(*plain())
    run_devices(tmp_path / "devices", wire, "strategy=fedavg", "engine.round_timeout=77")
    assert {ttl for _, kind, ttl in wire.log if kind == "train"} == {77.0}


@pytest.mark.parametrize("engine", ["local", "devices"])
def test_fewer_than_min_replies_leave_the_model_as_it_is(tmp_path, capsys, engine):
    """Round 2 has two replies of three. With min_replies=3 it counts as a round without a change."""
    bad = answers_but(1, "2", lambda m, r: with_array(r, Array(first(r).numpy() * np.nan)))
    options = ("strategy=pmfl", "min_replies=3", "num_rounds=2")
    if engine == "devices":
        model, metrics, clients, summary = run_devices(tmp_path / "two", Wire(*plain(), change=bad), *options)
        one = run_devices(tmp_path / "one", Wire(*plain()), "strategy=pmfl", "min_replies=3", "num_rounds=2")
        assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 3}
        assert not same(model, one[0])
    else:  # client 2 is absent in round 2
        trace = tmp_path / "trace.csv"
        trace.write_text("client,round,available\n0,1,1\n1,1,1\n2,1,1\n0,2,1\n1,2,1\n")
        small = [o for o in SMALL_RUN if not o.startswith("participation")]
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
    assert spread[2] == 0 < spread[1]  # one client is left
    assert "client 1, evaluation: a score that is not finite (loss)" in (said := capsys.readouterr().out)
    assert "round 3: 1 client failed; the first: client 0, evaluation: " in said


def test_a_client_that_comes_back_under_another_id_is_found_again(tmp_path):
    """Without a key Flower gives a restarted client a new id, and the old one does not return."""
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
