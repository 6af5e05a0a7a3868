"""A SuperLink that is silent for a while, for ever, or that has ended the run. The clock is simulated."""

import json
import signal

import httpx
import pytest
from helpers import same, slow
from test_deadlines import Clock, run_on
from test_devices import expected_without
from wire import Wire, plain, rows_of

from contrafed.core.errors import RunStopped
from contrafed.engines import client_registry, device_grid, superlink
from contrafed.engines.superlink import MAX_SILENCE_SECONDS, SuperLink
from contrafed.runs import server_app
from contrafed.runs.output import RunRecorder
from contrafed.training.workspace import uninstall

REQUEST = httpx.Request("POST", "http://127.0.0.1/v1/runtime")
CALLS = ("push_messages", "pull_messages", "get_node_ids")


def error_of(status):
    return httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status, request=REQUEST))


FAULTS = {
    "silent": lambda: httpx.ReadTimeout("timed out", request=REQUEST),
    "gone": lambda: httpx.ConnectError("refused", request=REQUEST),
    "broken": lambda: error_of(500),
}


@pytest.fixture
def clock(monkeypatch):
    one = Clock()
    for module in (client_registry, device_grid, superlink):
        monkeypatch.setattr(module, "time", one)
    yield one
    uninstall()


class FaultyWire(Wire):
    """Some calls fail for ``seconds`` from the first message of ``server_round`` on."""

    def __init__(self, clock, calls, fault, seconds, server_round="2"):
        super().__init__(*plain())
        self.clock, self.calls, self.fault, self.seconds, self.server_round = clock, calls, fault, seconds, server_round
        self.silent_from, self.pushes = None, 0

    def push_messages(self, messages):
        messages = list(messages)
        if self.silent_from is None and any(m.metadata.group_id == self.server_round for m in messages):
            self.silent_from = self.clock.now
        for message in messages:  # as Flower does, before anything is sent
            message.metadata.__dict__["_message_id"] = message.object_id
        self._fail("push_messages")
        return super().push_messages(messages)

    def pull_messages(self, ids):
        self._fail("pull_messages")
        return super().pull_messages(ids)

    def get_node_ids(self):
        self._fail("get_node_ids")
        return super().get_node_ids()

    def _fail(self, call):
        if call in self.calls and self.silent_from is not None and self.clock.now < self.silent_from + self.seconds:
            raise self.fault()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (call, fault) if number == kind else slow(call, fault)
        for number, call in enumerate(CALLS)
        for kind, fault in enumerate(FAULTS)
    ],
)
def test_a_run_goes_on_after_a_superlink_was_silent(tmp_path, clock, call, fault):
    begin, wire = clock.now, FaultyWire(clock, [call], FAULTS[fault], MAX_SILENCE_SECONDS - 2)
    model, metrics, summary = run_on("devices", wire, tmp_path / "run")
    assert clock.now - begin >= MAX_SILENCE_SECONDS - 2
    assert same(model, expected_without())
    assert rows_of(metrics, "failures") == {1: 0, 2: 0, 3: 0}
    assert summary["status"] == "finished"


@pytest.mark.parametrize("call", ["push_messages", "pull_messages"])
def test_a_silent_superlink_holds_up_a_round_to_its_limit(tmp_path, clock, call):
    wire = FaultyWire(clock, [call], FAULTS["silent"], 100)
    model, metrics, summary = run_on("devices", wire, tmp_path / "run", "engine.round_timeout=90", "eval_every=10")
    assert rows_of(metrics, "failures") == {1: 0, 2: 3, 3: 0}
    assert summary["status"] == "finished"


@pytest.mark.parametrize("overrides", [(), slow(("engine.round_timeout=90",))])
def test_a_run_ends_in_one_line_if_the_superlink_stays_silent(tmp_path, clock, overrides):
    wire = FaultyWire(clock, CALLS, FAULTS["silent"], 1e9)
    with pytest.raises(RunStopped) as stopped:
        run_on("devices", wire, tmp_path / "run", "checkpoint_every=1", *overrides)
    assert "\n" not in str(stopped.value)
    assert MAX_SILENCE_SECONDS <= clock.now - wire.silent_from < MAX_SILENCE_SECONDS + 100
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    wire.seconds = 0
    model, _, summary = run_on("devices", wire, tmp_path / "run", "checkpoint_every=1", "resume=latest", *overrides)
    assert summary["status"] == "finished"
    if not overrides:
        assert summary["resumed_from"].endswith("000001")


@pytest.mark.parametrize("status", [401, 403])
def test_a_superlink_that_has_ended_the_run_is_not_asked_again(tmp_path, clock, status):
    begin, wire = clock.now, FaultyWire(clock, CALLS, lambda: error_of(status), 1e9)
    with pytest.raises(RunStopped) as stopped:
        run_on("devices", wire, tmp_path / "run")
    assert clock.now - begin < 5
    assert stopped.value.status == "interrupted"
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_the_summary_is_whole_though_flower_interrupts_its_process(tmp_path, clock, monkeypatch):
    """Its heartbeats get the same answer in another thread, and raise SIGINT while the run is being written."""
    save = RunRecorder.save_model

    def save_after_sigint(*args):
        signal.raise_signal(signal.SIGINT)
        save(*args)

    monkeypatch.setattr(RunRecorder, "save_model", save_after_sigint)
    with pytest.raises(RunStopped):
        run_on("devices", FaultyWire(clock, CALLS, lambda: error_of(401), 1e9), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"


def test_flowers_handler_ends_the_process_after_the_run_is_written():
    done = []
    before = signal.signal(signal.SIGINT, lambda *_: done.append("flower"))
    try:
        with pytest.raises(KeyboardInterrupt), server_app._finish_before_sigint():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                done.append("written")
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == ["written", "flower"]


def test_flowers_own_retries_are_limited_for_the_run_and_not_for_its_heartbeats():
    from flwr.serverapp import Grid
    from flwr.superlink.grid.http_grid import HttpGrid

    grid = HttpGrid("127.0.0.1:1", insecure=True, token="t")
    assert isinstance(grid, Grid)
    heartbeats = grid._runtime_client
    link = SuperLink(grid)
    assert grid._runtime_client is not heartbeats
    assert heartbeats._retry_invoker is not link.retries is grid._runtime_client._retry_invoker
    assert heartbeats._retry_invoker.max_time is None
    asked = []
    assert link.ask(lambda: asked.append(link.retries.max_time), float("inf"), None) is None
    assert 0 < asked[0] <= MAX_SILENCE_SECONDS
    assert link.retries.should_giveup(error_of(401))
    assert not link.retries.should_giveup(FAULTS["silent"]())
