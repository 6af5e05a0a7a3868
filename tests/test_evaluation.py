"""Evaluation on clients: in stacks, within the time limit, without other data, and with the names of failed clients."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from helpers import SEVERAL, build_received, config_of, read_rows, sized_workspace, slow, workspace_of
from safetensors.torch import save_file

from contrafed import compose, run
from contrafed.core import codec, registry
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.evaluation import initial_model
from contrafed.server.base import Round
from contrafed.training import client_stack as stack_module
from contrafed.training.base import DeadlineError
from contrafed.training.workspace import install, uninstall

SIZES, TESTS = (20, 11, 1, 14), (7, 3, 0, 12)  # a client without a test part
LOCAL = {"iterations": None, "epochs": 1, "batch_size": 8, "keep_optimizer": True, "momentum": 0.5, "optimizer": "sgd"}


def train_workspace(name):
    """Return a workspace, the clients' received tensors, and their states after a round."""
    # Evaluation takes 8 examples at a time.
    workspace = sized_workspace(name, SIZES, tests=TESTS, local=LOCAL)
    workspace.evaluation_batch = 8
    received = [build_received(workspace)] * len(SIZES)
    updates = workspace.client_class(workspace, range(len(SIZES))).update(received, 1)
    return workspace, received, [update.client_state for update in updates]


def test_a_run_begun_from_a_half_precision_file_has_the_models_own(tmp_path):
    drawn = {"w": torch.zeros(3)}
    save_file({"w": torch.tensor([0.5, 1.0, 2.0], dtype=torch.bfloat16)}, tmp_path / "half.safetensors")
    found = initial_model(drawn, str(tmp_path / "half.safetensors"))["w"]
    assert (found.dtype, found.tolist()) == (torch.float32, [0.5, 1.0, 2.0])


@pytest.mark.parametrize("name", [name if name in SEVERAL else slow(name) for name in registry.choices("strategy")])
def test_a_stack_is_scored_as_its_clients_alone(name):
    workspace, received, client_states = train_workspace(name)
    kept = [{n: v.clone() for n, v in memory.items()} for memory in client_states]
    for options in ({}, {"final": True}, {"split": "train"}):
        stack = workspace.client_class(workspace, range(len(SIZES)), client_states)
        together = stack.evaluate_clients(received, 2, **options)
        for client, found in enumerate(together):
            (own,) = workspace.client_class(workspace, [client], [client_states[client]]).evaluate_clients(
                received[:1], 2, **options
            )
            assert found.metrics == pytest.approx(own.metrics, rel=1e-9)
            assert found.num_examples == own.num_examples == (SIZES if options.get("split") else TESTS)[client]
            for n, value in own.model.items():
                torch.testing.assert_close(found.model[n], value, rtol=1e-9, atol=1e-9)
        assert together[0].metrics["loss"] > 0
    assert [{n: v.tolist() for n, v in m.items()} for m in client_states] == [
        {n: v.tolist() for n, v in m.items()} for m in kept
    ]


@pytest.mark.parametrize(
    ("name", "looked_at"),
    [
        slow("fedavg", ()),
        slow("moon", ()),
        ("pmfl", ()),
        slow("fedper", ("personal/",)),
        slow("fedrep", ("personal/",)),
        ("fedcrl", ("own/", "personal/")),
    ],
)
def test_memory_that_is_not_asked_for_is_not_brought_together(name, looked_at):
    """Other client states cannot be stacked, because their shapes differ here."""
    workspace, received, client_states = train_workspace(name)
    others = [n for n in client_states[0] if not n.startswith(looked_at or "-")]
    assert any(n.startswith("optimizer/") for n in others)
    assert any(n.startswith("iterates/") for n in others) == (name == "pmfl")
    client_states[1] |= {n: torch.zeros(2, *client_states[1][n].shape) for n in others}
    stacks = []

    class Watched(workspace.client_class):
        def eval_models(self, stack):
            stacks.append(stack)
            return super().eval_models(stack)

    Watched(workspace, range(len(SIZES)), client_states).evaluate_clients(received, 2)
    (stack,) = stacks
    assert {n for n in stack.state if n.startswith(looked_at or "-")} == set(stack.state.loaded_tensors)
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        stack.state[others[0]]


def counting(monkeypatch):
    """Return a clock that counts how often stacks read it."""
    clock = itertools.count()
    monkeypatch.setattr(stack_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    return clock


def test_a_deadline_is_looked_at_before_every_batch(monkeypatch):
    """Twelve examples, two of a client's at a time, are six batches."""
    workspace, received, client_states = train_workspace("fedavg")
    client = workspace.client_class(workspace, range(len(SIZES)), client_states)
    counting(monkeypatch)
    client.evaluate_clients(received, 2, deadline=5)
    counting(monkeypatch)
    with pytest.raises(DeadlineError):
        client.evaluate_clients(received, 2, deadline=4.5)


def test_a_deadline_is_looked_at_in_training_before_an_evaluation(monkeypatch):
    """FedRep's last evaluation also fits a head in epochs of 3 steps. It evaluates both models on the client's 7 examples."""
    workspace, received, client_states = train_workspace("fedrep")
    client = workspace.client_class(workspace, [0], client_states[:1])
    clock = counting(monkeypatch)
    client.evaluate_clients(received[:1], 2, final=True, deadline=1e9)
    assert next(clock) == workspace.config.head_epochs * 3 + 2
    counting(monkeypatch)
    with pytest.raises(DeadlineError):
        client.evaluate_clients(received[:1], 2, final=True, deadline=workspace.config.head_epochs * 3 - 1.5)


@pytest.fixture
def ask():
    """Ask the clients of a workspace for their scores through a grid, and return the replies."""

    def replies(workspace, received, stack_size, timeout=None):
        settings, grid = workspace.run.to_json(), LocalGrid(len(received), stack_size)
        install(settings, workspace)
        content = RecordDict(
            {
                codec.ARRAYS: codec.to_record(received[0]),
                codec.CONFIG: ConfigRecord({"server-round": 3, "settings": settings, "cost": 1, "split": "test"}),
            }
        )
        messages = [Message(content, FIRST_NODE_ID + client, MessageType.EVALUATE) for client in range(len(received))]
        return list(grid.send_and_receive(messages, timeout=timeout))

    yield replies
    uninstall()


def test_clients_that_are_out_of_time_are_not_scored(monkeypatch, ask):
    workspace, received, _ = train_workspace("fedavg")
    assert len(ask(workspace, received, 1, timeout=600.0)) == len(SIZES)
    clock = itertools.count()
    monkeypatch.setattr(stack_module, "time", SimpleNamespace(monotonic=lambda: math.inf if next(clock) > 1 else 0.0))
    found = ask(workspace, received, 1, timeout=600.0)  # clients 0 and 1 take a batch each, client 2 has none
    assert [reply.metadata.src_node_id - FIRST_NODE_ID for reply in found] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fails", "error", "tried"),
    [(lambda clients: 2 in clients, RuntimeError("broken sensor"), [[0, 1, 2, 3], [0, 1], [2, 3], [2], [3]]),
     (lambda clients: len(clients) > 1, torch.OutOfMemoryError("CUDA out of memory"),
      [[0, 1, 2, 3], [0, 1], [0], [1], [2], [3]])], ids=["faulty", "large"],
)  # fmt: skip
def test_a_stack_that_fails_is_halved_until_the_faulty_client_is_alone_or_it_fits(ask, fails, error, tried):
    """A stack that does not fit is halved for all that come."""
    workspace, received, _ = train_workspace("fedavg")
    seen = []

    class Broken(workspace.client_class):
        def eval_models(self, stack):
            seen.append(stack.clients)
            if fails(stack.clients):
                raise error
            return super().eval_models(stack)

    workspace.client_class = Broken
    found = ask(workspace, received, 4)
    assert seen == tried
    assert [reply.has_error() for reply in found] == [fails([client]) for client in range(4)]
    if fails([2]):
        said = r"client 2, round 3, evaluation, step 0: RuntimeError: broken sensor \(tests/test_evaluation\.py, line \d+\)"
        assert re.fullmatch(said, found[2].error.reason)


def test_a_stack_that_no_client_fails_in_alone_is_told_of_once(ask):
    """``.item()`` works for a single client. On a GPU it would silently make every round slow."""
    workspace, received, _ = train_workspace("fedavg")

    class Branching(workspace.client_class):
        def scores(self, features, received):
            return features.logits * (1 if features.logits.sum().item() else 0)

    workspace.client_class = Branching
    found = ask(workspace, received, 4)
    assert not any(reply.has_error() for reply in found)
    (note,) = [about[codec.NOTE] for reply in found if (about := codec.config_of(reply))]
    said = "clients were run one by one, since as a stack, which is faster, they raise RuntimeError: vmap: It looks like"
    assert note.startswith(said)
    assert re.search(r"\(tests/test_evaluation\.py, line \d+\)", note)
    heard = Round(1, np.zeros(0))
    heard.hear(0, next(reply for reply in found if codec.config_of(reply)), set(), evaluating=True)
    assert heard.notes == [note]


def test_what_a_client_says_is_cut_and_no_terminal_obeys_it():
    heard = Round(1, np.zeros(0))
    said = "\x1b[2J" + "x" * 100_000
    content = RecordDict({codec.CONFIG: ConfigRecord({"state-lost": said, codec.NOTE: said})})
    heard.hear(3, SimpleNamespace(content=content), set(), evaluating=False)
    shown = " [2J" + "x" * (codec.MAX_NOTE_CHARACTERS - 4)
    assert heard.notes == [f"client 3 begins with an empty client state: {shown}", shown]


def test_a_lost_memory_is_told_once_however_often_its_client_is_evaluated_before_it_trains():
    forgetful, told = set(), []
    lost, well = (
        SimpleNamespace(content=RecordDict({codec.CONFIG: ConfigRecord(said)})) for said in ({"state-lost": "gone"}, {"x": 1})
    )
    asked = ((lost, True), (lost, True), (lost, False), (well, True), (lost, False), (lost, False), (lost, True))
    for message, evaluating in asked:
        heard = Round(1, np.zeros(0))
        heard.hear(3, message, forgetful, evaluating=evaluating)
        told.append(heard.state_lost)
    assert told == [1, 0, 0, 0, 1, 1, 1]


OWN_TEST_PARTS = (
    "dataset.merge_splits=true", "num_clients=4", "model=mlp", "model.hidden=[16]", "partition.min_client_size=12",
)  # fmt: skip


def client_of(name, client_states=None):
    workspace = workspace_of(config_of(f"strategy={name}", *OWN_TEST_PARTS), dtype=torch.float64)
    client = workspace.client_class(workspace, [1], client_states)
    down, _ = client.message_spec(client.model, client.config)
    start = {f"model/{n}": v for n, v in workspace.initial.items()}
    return client, {n: start.get(n, torch.zeros(s, dtype=torch.float64)).detach() for n, s in down.items()}


def test_after_its_local_work_a_client_is_evaluated_by_what_it_would_send():
    client, received = client_of("fedavg")
    (trained,) = client.update([received], 4)
    sent = {n.removeprefix("model/"): v for n, v in trained.tensors.items()}
    (after,) = client.evaluate_clients([received], 3, after_training=True)
    (given,) = client.evaluate_clients([received], 3, models=[sent])
    (before,) = client.evaluate_clients([received], 3)
    assert after.metrics == given.metrics
    assert after.metrics["loss"] < before.metrics["loss"]


@pytest.mark.parametrize("name", ["fedrep", "fedcrl", "moon"])
def test_what_is_evaluated_after_local_work_leaves_no_trace(name):
    client, received = client_of(name)
    (first,) = client.update([received], 1)
    client.client_states = [first.client_state]
    kept = {n: v.clone() for n, v in first.client_state.items()}
    (after,) = client.evaluate_clients([received], 1, after_training=True)
    assert all(torch.equal(v, kept[n]) for n, v in client.client_states[0].items())
    (again,) = client.update([received], 2)
    other, _ = client_of(name, [kept])
    (same,) = other.update([received], 2)
    assert all(torch.equal(v, same.tensors[n]) for n, v in again.tensors.items())
    own = again.client_state if name == "fedcrl" else again.tensors
    for n, value in after.model.items():
        kept_as = {f"model/{n}", f"personal/{n}", f"own/{n}"} & (own.keys() | again.client_state.keys())
        assert any(torch.equal(value, (own | again.client_state)[key]) for key in kept_as)


@pytest.mark.parametrize("asked", ["fedavg", "moon strategy.local.epochs=1", slow("fedproc strategy.local.epochs=1")])
def test_a_lone_clients_is_the_global_model_of_the_next_round(asked, tmp_path):
    """Its batches, its learning rate, and the server's broadcast are those of the next round."""
    one = (
        *f"strategy={asked}".split(), *OWN_TEST_PARTS[2:4], "dataset.merge_splits=true", "num_clients=1", "partition=iid",
        "participation=full",
    )  # fmt: skip
    found = {}
    for evaluate in ("download", "local_training"):
        own = (
            f"evaluate_after={evaluate}", f"output_dir={tmp_path / evaluate}", "num_rounds=4", "eval_every=1",
            "eval_clients=true",
        )  # fmt: skip
        run(compose(*one, *own, "strategy.local.lr_decay=0.5", "engine=local"))
        rows = [
            row
            for row in read_rows(tmp_path / evaluate / "metrics.csv")
            if row["metric"] == "loss" and row["split"] in ("clients", "test")
        ]
        scope = ("global", "clients") if evaluate == "download" else ("personal", "test")
        found[evaluate] = [float(row["value"]) for row in rows if (row["scope"], row["split"]) == scope]
    assert len(found["download"]) == 5
    assert found["local_training"][:-1] == pytest.approx(found["download"][1:], rel=1e-6)


def test_a_run_reports_it_as_personal_beside_the_global_score(tmp_path):
    settings = (
        "strategy=fedavg", *OWN_TEST_PARTS, "engine=local", "num_rounds=2", "participation=full",
        "evaluate_after=local_training",
    )  # fmt: skip
    summary = run(compose(*settings, "save_personal=true", f"output_dir={tmp_path / 'a'}"))
    scopes = {(row["scope"], row["split"]) for row in read_rows(tmp_path / "a" / "metrics.csv")}
    assert {("personal", "test"), ("global", "test")} <= scopes
    assert len(list((tmp_path / "a" / "personal").iterdir())) == 4
    assert summary["num_rounds"] == 2
