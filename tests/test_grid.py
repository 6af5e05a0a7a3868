"""The Grid of virtual clients, its messages, the NumPyClient, and rejected replies."""

import pickle
import re

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from helpers import METHODS, Schedule, Through, digits_run, run_strategy, same, workspace_of
from tiny import tiny_workspace, train_message

import contrafed.client_app.app
from contrafed.core import codec
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID, RUN_ID
from contrafed.server.replies import norm, read_reply
from contrafed.training.client_stack import compute_row_norms, unstack_views
from contrafed.training.workspace import install, uninstall


@pytest.fixture
def tiny():
    config, workspace, settings = tiny_workspace("strategy=moon")
    grid = LocalGrid(6, 1)
    install(settings, workspace)
    yield workspace, settings, grid
    uninstall()


def test_grid_validates_messages(tiny):
    workspace, settings, grid = tiny
    stranger = train_message(workspace, settings, client=6)
    with pytest.raises(ValueError, match="there is no client 1006"):
        grid.push_messages([stranger])
    sent = train_message(workspace, settings)
    grid.push_messages([sent])
    with pytest.raises(ValueError, match="already has an id"):
        grid.push_messages([sent])
    assert grid.get_node_ids() == [1000 + k for k in range(6)]


def test_push_then_pull(tiny):
    workspace, settings, grid = tiny
    ids = list(grid.push_messages(train_message(workspace, settings, client=k) for k in (3, 1)))
    replies = list(grid.pull_messages(ids))
    assert [r.metadata.src_node_id for r in replies] == [1003, 1001]
    assert [r.metadata.reply_to_message_id for r in replies] == ids
    assert list(grid.pull_messages(ids)) == []


def test_a_client_cannot_reach_its_neighbours_through_the_shared_message(tiny, monkeypatch):
    workspace, settings, grid = tiny
    shared = train_message(workspace, settings).content
    messages = [Message(shared, FIRST_NODE_ID + k, MessageType.TRAIN) for k in range(2)]
    before = {n: t.clone() for n, t in codec.from_record(shared["arrays"]).items()}
    original = contrafed.client_app.app._decode_received

    def vandal(stack):
        received = original(stack)
        for message in stack:
            message.content["arrays"].clear()
            message.content["config"]["settings"] = "gone"
        return received

    monkeypatch.setattr(contrafed.client_app.app, "_decode_received", vandal)
    replies = list(grid.send_and_receive(messages))
    assert not any(r.has_error() for r in replies), [r.error for r in replies if r.has_error()]
    assert same(codec.from_record(shared["arrays"]), before)


def test_a_faulty_client_fails_alone_and_keeps_its_memory(monkeypatch):
    """In a stack of four, client 2 raises in round 2. The others are accepted, and client 2 keeps the state of round 1."""
    config, workspace, settings = tiny_workspace("strategy=moon")
    grid = LocalGrid(6, 4)
    original = workspace.client_class.local_update

    def local_update(client, stack):
        if stack.server_round == 2 and 2 in stack.clients:
            raise RuntimeError("broken sensor")
        return original(client, stack)

    monkeypatch.setattr(workspace.client_class, "local_update", local_update)
    held = []

    def look(messages, replies):
        held.append({n: {k: t.clone() for k, t in grid.client_states.get(n).items()} for n in grid.client_states})
        return replies

    how = {"grid": grid, "wrap": lambda grid: Through(grid, look), "may_fail": True}
    _, strategy = run_strategy(workspace, config, Schedule([range(4)] * 2), 2, **how)
    assert strategy.round.rejected["failed"] == 1
    (said,) = strategy.round.failures
    assert re.fullmatch(r"client 2, round 2, step 0: RuntimeError: broken sensor \(tests/test_grid\.py, line \d+\)", said)
    first, second = held
    assert same(first[1002], second[1002])
    assert not same(first[1001], second[1001])


def test_out_of_time_clients_do_not_answer(tiny):
    workspace, settings, grid = tiny
    messages = [train_message(workspace, settings, client=k) for k in range(3)]
    assert list(grid.send_and_receive(messages, timeout=0.0)) == []
    assert not list(grid.client_states)


def test_an_unknown_message_type_is_an_error_reply(tiny):
    workspace, settings, grid = tiny
    other = Message(train_message(workspace, settings).content, FIRST_NODE_ID, "train.elsewhere")
    (reply,) = grid.send_and_receive([other])
    assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert "elsewhere" in reply.error.reason


def test_messages_survive_the_wire(tiny):
    """Through Flower's own serialisation and back, the ClientApp gives an equal reply."""
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

    wire_context = context()
    far = contrafed.client_app.app.app(received, wire_context)
    (near,), (near_state,) = contrafed.client_app.app.run_stack([message], [0], [{}])
    assert same(codec.from_record(far.content["arrays"]), codec.from_record(near.content["arrays"]))
    assert dict(far.content["metrics"]) == dict(near.content["metrics"])
    assert same(codec.state_of(wire_context.state, "client_state"), near_state)


def test_tensor_arrays_pickle_and_serialise_like_flowers():
    for tensor in (torch.randn(3, 4), torch.randn(4, 3).T, torch.tensor(5), torch.arange(3)):
        array = codec.TensorArray(tensor)
        assert torch.equal(codec.to_tensor(pickle.loads(pickle.dumps(array))), tensor)
        flowers = ArrayRecord([tensor.contiguous().numpy()])["0"]
        assert (array.dtype, array.shape, array.stype) == (flowers.dtype, flowers.shape, flowers.stype)
        assert np.array_equal(codec.to_tensor(flowers).numpy(), array.numpy())


def test_a_norm_is_known_of_an_unchanged_tensor_alone():
    """Ray's workers send it along. Of a tensor that replaces it, or that is changed in place, it is not known."""
    stack = {"a": torch.tensor([[3.0, 4.0], [6.0, 8.0]])}
    rows = unstack_views(stack, 2)
    norms = compute_row_norms(stack, rows)
    records = [codec.to_record(row, known) for row, known in zip(rows, norms, strict=True)]
    make, parts = codec.reduce_record(records[1])
    assert [record["a"].__dict__["norm"] for record in (*records, make(*parts))] == [5, 10, 10]
    rows[0] = {"a": rows[0]["a"].clone()}
    rows[1]["a"].zero_()
    assert [codec.to_record(row, known)["a"].__dict__["norm"] for row, known in zip(rows, norms, strict=True)] == [None, None]


@pytest.mark.parametrize("method", METHODS)
def test_plain_numpy_client(method):
    """get_parameters, fit and evaluate for one client, and again as a legacy ``client_fn``."""
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


def poison_grid(kind):
    """Return a grid whose client 1 sends an invalid reply."""

    def change(messages, replies):
        for reply in replies:
            if reply.metadata.src_node_id == FIRST_NODE_ID + 1:
                kind(reply)
        return replies

    return lambda grid: Through(grid, change)


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
    models, strategy = run_strategy(workspace, config, Schedule([[0, 1, 2]]), 1, wrap=poison_grid(kind), may_fail=True)
    assert dict(strategy.round.rejected) == {cause: 1}
    without, _ = run_strategy(workspace_of(config), config, Schedule([[0, 2]]), 1)
    assert same(models[-1], without[-1])


def test_a_reply_beyond_the_norm_bound_is_rejected():
    _, strategy = digits_run("pmfl", 1, clients=2)
    sent = Message(RecordDict(), FIRST_NODE_ID, MessageType.TRAIN)
    tensors = {name: torch.ones(s) for name, s in strategy.upload_spec.items()}
    reply = Message(
        RecordDict({"arrays": codec.to_record(tensors), "metrics": MetricRecord({"num-examples": 1})}), reply_to=sent
    )
    with pytest.raises(ValueError, match="norm too large"):
        read_reply(0, reply, strategy.upload_spec, {}, 1, 1e-6)
    assert read_reply(0, reply, strategy.upload_spec, {}, 1, 1e6).client == 0


@pytest.mark.parametrize("value", [7.0, float("nan"), float("inf")])
def test_a_counter_is_in_no_norm_and_finite(value):
    sent = Message(RecordDict(), FIRST_NODE_ID, MessageType.TRAIN)
    tensors = {"model/w": torch.ones(2), "model/norm.num_batches_tracked": torch.tensor(value)}
    numbers = MetricRecord({"num-examples": 1})
    reply = Message(RecordDict({"arrays": codec.to_record(tensors), "metrics": numbers}), reply_to=sent)
    asked = {name: tuple(tensor.shape) for name, tensor in tensors.items()}, {}, 1, 2.0, (), ("norm.num_batches_tracked",)
    if value == 7:
        assert read_reply(0, reply, *asked).norm == pytest.approx(2**0.5)
    else:
        with pytest.raises(ValueError, match="finite"):
            read_reply(0, reply, *asked)


def test_rounds_with_nobody_and_empty_clients_pass():
    config, workspace, _ = tiny_workspace("strategy=pmfl")
    models, _ = run_strategy(workspace, config, Schedule([[], [], []]), 3)
    assert same(models[0], models[-1])


def test_the_norm_is_infinite_only_when_an_element_is():
    assert norm([torch.tensor([3.0]), torch.tensor([[4.0]])]) == pytest.approx(5.0)
    assert norm([torch.full((4,), 1e30)]) == pytest.approx(2e30)  # its square overflows float32
    assert norm([]) == 0
    for bad in (float("nan"), float("inf")):
        assert not np.isfinite(norm([torch.ones(3), torch.tensor([1.0, bad])]))
