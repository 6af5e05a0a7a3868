"""A reply that never arrives counts as failed, also without a time limit. The clock is simulated."""

import json
import time

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from helpers import same
from safetensors.torch import load_file
from test_client_registry import register_on
from test_devices import expected_without
from wire import RUN, SMALL_RUN, Wire, answers_but, plain, rows_of

from contrafed.core.errors import UserError
from contrafed.engines import client_registry, device_grid, flower
from contrafed.engines.deadlines import MAX_QUERY_SECONDS, MAX_REPLY_SECONDS
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.flower import FlowerGrid
from contrafed.engines.worker import identify
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run
from contrafed.training.workspace import uninstall

POLL_SECONDS = 600.0


class Clock:
    """Replaces the module ``time``: sleep takes no time and advances the clock."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 10 * MAX_REPLY_SECONDS, "it waits for ever"


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    for module in (client_registry, device_grid, flower):
        monkeypatch.setattr(module, "time", one)
        monkeypatch.setattr(module, "POLL_SECONDS", POLL_SECONDS)
    yield one
    uninstall()


GRIDS = {
    "devices": lambda wire, patience: DeviceGrid(wire, RUN, patience),
    "flower-simulation": lambda wire, patience: FlowerGrid(wire, "flower-simulation", patience=patience),
}


def run_on(grid, wire, folder, *overrides):
    """Run on ``grid`` over ``wire``, and return (model, metrics.csv, summary)."""
    config = compose_deployed_run(" ".join([*SMALL_RUN, "strategy=fedavg", *overrides, f"output_dir={folder}"]))
    serve(GRIDS[grid](wire, config.wait_for_clients), config)
    summary = json.loads((folder / "summary.json").read_text())
    return load_file(folder / "model.safetensors"), (folder / "metrics.csv").read_bytes(), summary


@pytest.mark.parametrize("grid", GRIDS)
def test_a_reply_that_never_comes_has_failed_when_its_message_has_expired(tmp_path, capsys, clock, grid):
    begin, wire = clock.now, Wire(*plain(), change=answers_but(1, "2", lambda message, reply: None))
    model, metrics, summary = run_on(grid, wire, tmp_path / "run")
    assert 0 <= clock.now - begin - MAX_REPLY_SECONDS < POLL_SECONDS
    assert same(model, expected_without(2))
    assert rows_of(metrics, "failures") == {1: 0, 2: 1, 3: 0}
    assert (summary["status"], summary["failures"], summary["replies_rejected"]) == ("finished", 1, 0)
    said = capsys.readouterr().out
    assert "round 2: 1 client failed; the first: client 1" in said
    assert "no reply within 43200 s" in said


def test_a_round_timeout_is_the_deadline_where_it_is_set(tmp_path, capsys, clock):
    begin, wire = clock.now, Wire(*plain(), change=answers_but(1, "2", lambda message, reply: None))
    model, metrics, _ = run_on("devices", wire, tmp_path / "run", "engine.round_timeout=1800")
    assert clock.now - begin == 1800
    assert same(model, expected_without(2))
    assert rows_of(metrics, "failures") == {1: 0, 2: 1, 3: 0}
    assert "client 1: no answer in time" in capsys.readouterr().out


def test_flower_takes_no_reply_after_the_deadline():
    identify()
    assert Message(RecordDict(), 10, "train").metadata.ttl == MAX_REPLY_SECONDS


@pytest.mark.parametrize("grid", GRIDS)
def test_a_client_whose_answer_is_lost_is_asked_again(tmp_path, clock, grid):
    queries = []

    def lose_the_first(k, message, reply):
        if message.metadata.message_type == "query" and k == 1:
            queries.append(message.metadata.ttl)
            return None if len(queries) == 1 else reply
        return reply

    begin = clock.now
    model, _, summary = run_on(grid, Wire(*plain(), change=lose_the_first), tmp_path / "run", "wait_for_clients=null")
    assert len(queries) == 2
    assert MAX_QUERY_SECONDS <= clock.now - begin < MAX_QUERY_SECONDS + 2 * POLL_SECONDS
    assert same(model, expected_without())
    assert summary["failures"] == 0


def test_a_query_that_the_superlink_no_longer_has_is_sent_again(tmp_path, clock):
    """The SuperLink answers for a message whose time is over that it is not available."""
    asked = []

    def lose_the_first(k, message, reply):
        if message.metadata.message_type == "query" and k == 1:
            asked.append(k)
            if len(asked) == 1:
                return Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "expired"), reply_to=message)
        return reply

    model, _, summary = run_on("devices", Wire(*plain(), change=lose_the_first), tmp_path / "run", "wait_for_clients=null")
    assert len(asked) == 2
    assert same(model, expected_without())


def test_a_silent_device_does_not_hide_those_that_connect_later(tmp_path, monkeypatch, quick_devices):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client_registry, "LOOK_SECONDS", 0.05)
    wire = Wire(*plain(), offline={1, 2})

    def connect(k, message, reply):
        wire.offline = set()
        return None if k == 0 else reply

    wire.change = connect
    with pytest.raises(UserError, match="2 of 3 clients are here; missing: partition 0"):
        register_on(wire, patience=1.0)


def test_a_slow_answer_counts_and_is_asked_for_once(tmp_path, monkeypatch, quick_devices):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(client_registry, "LOOK_SECONDS", 0.05)
    wire, began = Wire(*plain()), time.monotonic()
    pull = wire.pull_messages
    wire.pull_messages = lambda ids: pull(ids) if time.monotonic() > began + 0.5 else []
    register_on(wire)
    assert sorted(k for k, kind, _ in wire.log if kind == "query") == [0, 1, 2]
