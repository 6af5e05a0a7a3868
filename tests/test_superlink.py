"""A SuperLink that is silent for a while, for ever, or that has ended the run. The clock is simulated."""

import json
import signal
import time
from types import SimpleNamespace

import httpx
import pytest
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid
from helpers import same, slow
from test_deadlines import Clock, run_on
from test_devices import expected_without
from wire import Wire, plain, rows_of

from contrafed.core import codec
from contrafed.core.errors import RunStopped, UserError
from contrafed.engines import client_registry, device_fetch, device_grid, device_keys, superlink
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.superlink import MAX_SILENCE_SECONDS, SuperLink
from contrafed.engines.worker import identify
from contrafed.runs import server_app
from contrafed.runs.output import RunRecorder
from contrafed.training.workspace import uninstall

REQUEST = httpx.Request("POST", "http://127.0.0.1/v1/runtime")
CALLS = ("push_messages", "pull_messages", "get_node_ids", "get_nodes")


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
        super().__init__(*plain(), offline={3}, keys=(b"a", b"b", b"c", b"d"))
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
        # A fourth device connects while calls fail, and leaves. Its names and keys are asked for with get_nodes.
        return [*super().get_node_ids(), *([13] if self.silent_from is not None and self.seconds else [])]

    def get_nodes(self):
        self._fail("get_nodes")
        return super().get_nodes()

    def _fail(self, call):
        if call in self.calls and self.silent_from is not None and self.clock.now < self.silent_from + self.seconds:
            raise self.fault()


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (call, fault) if number % len(FAULTS) == kind else slow(call, fault)
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


class StubClient:
    """Flower's HTTP client of a SuperLink that has the replies of clients 10, 11 and 12. It gives each message only once."""

    def __init__(self):
        self._retry_invoker = None
        self.replies, self.objects, self.pulled = {}, {}, []
        self.uploading = lambda client: False  # whether the pieces of a client's reply are still missing
        self.faults = {}  # by call, the errors of the next calls

    def PushMessages(self, request):
        messages = [message_from_proto(proto) for proto in request.messages_list]
        for message in messages:
            client = message.metadata.dst_node_id
            reply = Message(RecordDict({codec.METRICS: MetricRecord({"num-examples": client})}), reply_to=message)
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.replies[message.metadata.message_id] = client, reply
        ids = [message.metadata.message_id for message in messages]
        return SimpleNamespace(message_ids=ids, objects_to_push=[], session_id="")

    def PushObject(self, request):
        raise AssertionError("no piece was asked for")

    def PullMessages(self, request):
        protos, trees = [], []
        for client, reply in [self.replies.pop(i) for i in request.message_ids if i in self.replies]:
            self.objects |= {i: (client, part.deflate()) for i, part in get_all_nested_objects(reply).items()}
            protos.append(message_to_proto(remove_content_from_message(reply)))
            trees.append(get_object_tree(reply))
        return SimpleNamespace(messages_list=protos, message_object_trees=trees)

    def PullObject(self, request):
        self._fail("PullObject")
        client, content = self.objects[request.object_id]
        if self.uploading(client):
            return SimpleNamespace(object_found=True, object_available=False, object_content=b"")
        self.pulled.append(request.object_id)
        return SimpleNamespace(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self._fail("ConfirmMessageReceived")

    def _fail(self, call):
        if errors := self.faults.get(call):
            raise errors.pop()


@pytest.fixture
def stub(monkeypatch, quick_devices):
    identify()
    monkeypatch.setattr(superlink, "RETRY_SECONDS", 0.01)
    return StubClient()


def replies_through(stub, timeout):
    """Return the replies that Flower's own Grid gets from a stub, by client: the number of examples, or the error's reason."""
    contents = [RecordDict({codec.CONFIG: ConfigRecord({"server-round": 1})}) for _ in range(3)]
    messages = [Message(content, 10 + k, MessageType.TRAIN, group_id="1") for k, content in enumerate(contents)]
    grid = HttpGrid(token="t", insecure=True)
    grid._client, grid._run = stub, SimpleNamespace(run_id=messages[0].metadata.run_id)
    found = {
        reply.metadata.reply_to_message_id: reply for reply in DeviceGrid(grid, 1).send_and_receive(messages, timeout=timeout)
    }
    replies = {m.metadata.dst_node_id: found[m.metadata.message_id] for m in messages if m.metadata.message_id in found}
    return {
        client: reply.error.reason if reply.has_error() else reply.content[codec.METRICS]["num-examples"]
        for client, reply in replies.items()
    }


def test_a_reply_that_comes_while_the_server_sleeps_is_in_time(stub, monkeypatch):
    began = time.monotonic()
    monkeypatch.setattr(device_grid, "POLL_SECONDS", 60.0)
    stub.uploading = lambda client: time.monotonic() < began + 0.5
    assert replies_through(stub, 1.0) == {10: 10, 11: 11, 12: 12}
    assert time.monotonic() - began < 30


def test_an_upload_that_breaks_off_holds_up_no_other_reply(stub):
    """Without power a device sends nothing more. The SuperLink says for three minutes that its upload is under way."""
    began = time.monotonic()
    stub.uploading = lambda client: client == 11 and time.monotonic() < began + 6
    assert replies_through(stub, 1.0) == {10: 10, 12: 12}
    assert time.monotonic() - began < 4


def test_a_slow_upload_counts_if_it_ends_in_time(stub):
    began = time.monotonic()
    stub.uploading = lambda client: client == 11 and time.monotonic() < began + 0.3
    assert replies_through(stub, 20.0) == {10: 10, 11: 11, 12: 12}
    assert len(stub.pulled) == len(set(stub.pulled)) > 0


def test_an_upload_that_breaks_off_fails_also_without_a_round_timeout(stub, monkeypatch):
    monkeypatch.setattr(device_fetch, "MAX_PAUSE_SECONDS", 0.1)
    began = time.monotonic()
    stub.uploading = lambda client: client == 11 and time.monotonic() < began + 6
    found = replies_through(stub, None)
    assert found.pop(11).startswith("its upload stopped")
    assert found == {10: 10, 12: 12}


@pytest.mark.parametrize("call", ["PullObject", "ConfirmMessageReceived"])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_between_a_message_and_its_pieces_loses_no_reply(stub, call, fault):
    stub.faults[call] = [FAULTS[fault]() for _ in range(2)]
    assert replies_through(stub, 5.0) == {10: 10, 11: 11, 12: 12}


@pytest.mark.parametrize("fault", FAULTS)
def test_whether_devices_have_keys_is_asked_again_after_an_error(tmp_path, clock, monkeypatch, fault):
    errors = [FAULTS[fault]() for _ in range(5)]

    def demands_keys(grid):
        if errors:
            raise errors.pop()
        return False

    monkeypatch.setattr(device_grid, "demands_keys", demands_keys)
    assert run_on("devices", Wire(*plain()), tmp_path / "run", "num_rounds=1")[2]["status"] == "finished"
    assert not errors


def test_a_passing_error_is_not_an_answer_about_keys(monkeypatch):
    grid = SimpleNamespace(_addr="127.0.0.1:1", _insecure=True, _cert=None)
    with pytest.raises(httpx.ConnectError):
        device_keys.demands_keys(grid)
    for status, kind in ((500, httpx.HTTPStatusError), (404, UserError)):

        def register(client, request, status=status):
            raise error_of(status)

        monkeypatch.setattr(device_keys.FleetHttpClient, "RegisterNode", register)
        with pytest.raises(kind):
            device_keys.demands_keys(grid)


def test_a_piece_that_two_attempts_fetch_counts_once():
    """Flower's threads of an earlier attempt go on after it has ended."""
    fetcher = device_fetch.ReplyFetcher(
        SimpleNamespace(
            PullMessages=lambda request: SimpleNamespace(messages_list=[1]),
            PullObject=lambda request: pull_twice(request),
            ConfirmMessageReceived=lambda request: None,
        )
    )
    fetcher.limit, inner = 15, []

    def pull_twice(request):
        if not inner:
            inner.append(None)
            fetcher._pull_object(request)
        return SimpleNamespace(object_found=True, object_available=True, object_content=b"0123456789")

    fetcher.open("m")
    assert fetcher._pull_object(SimpleNamespace(object_id="a")).object_content == b"0123456789"
    assert fetcher.replies["m"].size == 10
    with pytest.raises(ValueError, match="more than 15 bytes"):
        fetcher._pull_object(SimpleNamespace(object_id="b"))
