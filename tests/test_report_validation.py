"""Checks of what clients report against known values, and clients that stall, return and replace others."""

import re
import time

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from helpers import config_of, digits_run, slow
from wire import Wire, answers_but, plain, rows_of, run_devices

import contrafed.engines.client_registry
from contrafed.core import codec
from contrafed.core.client_run import client_run_of
from contrafed.core.errors import UserError
from contrafed.data.federation import load_federation
from contrafed.engines.client_registry import Registry
from contrafed.server.base import Replies, Reply
from contrafed.server.prototypes import Prototypes

pytestmark = pytest.mark.usefixtures("quick_devices")


def claims(kind, k, when="2", **numbers):
    """A client whose replies of one kind report other numbers."""

    def report(message, reply):
        metrics = MetricRecord({**reply.content[codec.METRICS], **numbers})
        return Message(RecordDict({**reply.content, codec.METRICS: metrics}), metadata=reply.metadata)

    return answers_but(k, when, report, kind)


@pytest.mark.parametrize("count", [1, 2**62])
def test_a_client_weighs_what_it_holds(tmp_path, capsys, count):
    wire = Wire(*plain(), change=claims("train", 1, **{"num-examples": count}))
    _, metrics, *_ = run_devices(tmp_path / "run", wire, "strategy=fedavg")
    assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 1, 3: 0}
    assert "client 1: wrong number of examples" in capsys.readouterr().out


@pytest.mark.parametrize(
    "numbers",
    [
        {"num-examples": 2**62},
        *map(slow, ({"num-examples": 1}, {"num-examples": float("inf")}, {"accuracy": -0.5})),
        {"accuracy": 1.5},
        {"loss": 1e39},
        slow({"num-examples": 4.9}),
    ],
)
def test_a_score_that_cannot_be_does_not_count(tmp_path, numbers):
    wire = Wire(*plain(), change=claims("evaluate", 1, **numbers))
    _, metrics, _, summary = run_devices(tmp_path / "run", wire, "strategy=fedcrl")
    assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 1, 3: 0}
    assert summary["status"] == "finished"


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308])
def test_a_loss_that_float32_does_not_hold_is_rejected(tmp_path, capsys, loss):
    """The difference of two such losses is not finite."""
    wire = Wire(*plain(), change=claims("train", 1, loss=loss))
    _, metrics, *_ = run_devices(tmp_path / "run", wire, "strategy=fedavg")
    assert rows_of(metrics, "replies_rejected") == {1: 0, 2: 1, 3: 0}
    assert "client 1: a score that cannot be (loss)" in capsys.readouterr().out


def test_a_class_weighs_no_more_than_the_client_holds():
    """Counts of 1e30 and -10 compete with 5 of 5. The first is bounded by its client's 10 examples, the second by 0."""
    rows = [(5, 5.0, 1.0), (10, 1e30, 4.0), (10, -10.0, 9.0)]
    replies = Replies(
        Reply(k, {"proto/count": torch.tensor([count]), "proto/mean": torch.tensor([[mean]])}, examples, {})
        for k, (examples, count, mean) in enumerate(rows)
    )
    table = Prototypes({}, {"proto/mean": (1, 1), "proto/valid": (1,)})
    table.merge(replies, "class_count")
    assert table.broadcast()["proto/mean"].tolist() == [[3.0]]  # (5 * 1 + 10 * 4) / 15


def test_an_agent_does_without_a_loss_that_is_not_said_or_not_finite(tmp_path):
    wire = Wire(*plain(), change=claims("train", 1, loss=float("nan")))
    *_, summary = run_devices(tmp_path / "run", wire, "strategy=fedppo", "strategy.choose=2", "participation=full")
    assert summary["status"] == "finished"
    _, strategy = digits_run("fedppo", 2, clients=4, choose=2)
    assert np.isfinite(strategy.state["loss"]).all()


ODD_CLAIMS = {
    "infinite partition": {"partition-id": float("inf")},
    "infinite count": {"num-test-examples": float("inf")},
    "counts beyond int64": {"class-counts": [1e300] * 10},
    "one number": {"class-counts": 5},
    "negative": {"class-counts": [-1] * 10},
    "more than there can be": {"class-counts": [2**60] * 10},
}


@pytest.mark.parametrize("odd", ODD_CLAIMS)
def test_an_odd_answer_before_round_1_is_one_line(tmp_path, odd):
    wire = Wire(*plain(), change=claims("query", 1, when=None, **ODD_CLAIMS[odd]))
    with pytest.raises(UserError, match="client (11|of partition 1) ") as caught:
        run_devices(tmp_path / "run", wire, "strategy=fedavg")
    assert "\n" not in str(caught.value)


def joins(wire, how):
    """Register another device after the replies of round 1. ``how`` changes its replies."""

    def change(k, message, reply):
        if message.metadata.group_id == "1" and message.metadata.message_type == MessageType.TRAIN:
            wire.offline = set()
        return how(k, message, reply) if k == 3 else reply

    wire.change = change
    return wire


@pytest.mark.parametrize("odd", ["no numbers", "one number", *(slow(odd) for odd in ODD_CLAIMS if odd != "one number")])
def test_an_odd_answer_of_a_newcomer_leaves_the_run_as_it_is(tmp_path, capsys, odd):
    def how(k, message, reply):
        if odd == "no numbers":
            return Message(RecordDict({codec.METRICS: ConfigRecord({"a": 1})}), metadata=reply.metadata)
        return claims("query", 3, when=None, **ODD_CLAIMS[odd])(k, message, reply)

    wire = joins(Wire(*plain(), {"partition-id": 1}, offline={3}), how)
    *_, summary = run_devices(tmp_path / "run", wire, "strategy=fedavg")
    assert (summary["status"], summary["failures"]) == ("finished", 0)
    assert re.search("client (13|of partition 1) ", capsys.readouterr().out)


def test_a_newcomer_that_is_silent_is_asked_ever_less_and_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(contrafed.engines.client_registry, "NEWCOMER_SECONDS", 0.05)
    wire = joins(Wire(*plain(), {"partition-id": 1}, offline={3}), lambda k, message, reply: None)
    began = time.monotonic()
    *_, summary = run_devices(tmp_path / "run", wire, "strategy=fedavg", "num_rounds=16", "wait_for_clients=30")
    assert time.monotonic() - began < 30  # the patience of a single question
    assert summary["failures"] == 0
    # After round 1, 2, 4, 8 and 16.
    assert sum(k == 3 and kind == MessageType.QUERY for k, kind, _ in wire.log) == 5


class Answering:
    """Clients that reply to queries as a device of their partition does. The list has the clients that are online."""

    def __init__(self, federation, partitions):
        self.federation, self.partitions, self.online = federation, partitions, set(partitions)

    def get_node_ids(self):
        return sorted(self.online)

    def get_names(self):
        return {}

    def send(self, messages, timeout):
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        return {message.metadata.message_id: message for message in messages}, []

    def receive(self, waiting, ends):
        return [self.reply(waiting.pop(identifier)) for identifier in list(waiting)]

    def reply(self, message):
        k = self.partitions[message.metadata.dst_node_id]
        partition = self.federation.partition
        metrics = {
            "partition-id": k,
            "class-counts": partition.class_counts()[k].tolist(),
            "num-test-examples": len(partition.test(k)),
        }
        about = ConfigRecord({"own-data": False, "classes": []})
        return Message(RecordDict({codec.METRICS: MetricRecord(metrics), codec.CONFIG: about}), reply_to=message)


def test_a_client_has_its_partition_back_from_one_that_stood_in_for_it():
    run = client_run_of(config_of("num_clients=3", "partition.min_client_size=5"))
    grid = Answering(load_federation(run), {10: 0, 11: 1, 12: 2, 99: 1})
    grid.online = {10, 11, 12}
    found = Registry(grid, grid.federation, run.to_json(), {}, 30.0)
    found.wait()
    grid.online = {10, 12, 99}
    assert found.newcomers() == ["client of partition 1 is back, under another id"]
    grid.online = {10, 11, 12, 99}
    assert found.newcomers() == []  # one at a time
    grid.online = {10, 11, 12}
    assert [line for _ in range(2) for line in found.newcomers()] == ["client of partition 1 is back, under another id"]
    assert found.node_ids.tolist() == [10, 11, 12]


def test_what_clients_say_of_themselves_is_fetched_up_to_a_limit(tmp_path):
    def swollen(message, reply):
        about = ConfigRecord({**reply.content[codec.CONFIG], "junk": b"x" * (2 << 20)})
        return Message(RecordDict({**reply.content, codec.CONFIG: about}), metadata=reply.metadata)

    with pytest.raises(UserError, match=r"client 11 could not be asked .* it has more than 1048576 bytes"):
        run_devices(tmp_path / "run", Wire(*plain(), change=answers_but(1, None, swollen, "query")), "strategy=fedavg")
