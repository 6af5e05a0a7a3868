"""Devices that come back during a run, and what their answers may hold."""

import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from test_client_registry import client_comes_back, refuse

from contrafed.core import codec
from contrafed.core.errors import UserError
from contrafed.engines.client_answer import Answer

pytestmark = pytest.mark.usefixtures("quick_devices")


def say_own_data(message, reply):
    reply.content[codec.CONFIG]["own-data"] = True
    return reply


def read_other_examples(message, reply):
    reply.content[codec.CONFIG]["fingerprint"] = "other"
    return reply


def test_a_device_that_comes_back_is_checked_as_at_the_beginning(tmp_path, monkeypatch):
    grid, wire = client_comes_back(tmp_path, monkeypatch, refuse)
    wire.change = lambda k, message, reply: say_own_data(message, reply) if k == 3 else reply
    (line,) = grid.newcomers()
    assert line.startswith("partition: client of partition 1 has data of its own")
    grid, wire = client_comes_back(tmp_path, monkeypatch, refuse)
    wire.change = lambda k, message, reply: read_other_examples(message, reply) if k == 3 else reply
    first, second = grid.newcomers()
    assert "reads other examples than the server" in first
    assert second == "client of partition 1 is back, under another id"


@pytest.mark.parametrize("numbers", [{"partition-id": 0.7}, {"num-test-examples": 3.9}, {"class-counts": [1.5] * 10}])
def test_numbers_of_examples_are_whole(numbers):
    metrics = {"partition-id": 0, "class-counts": [1] * 10, "num-test-examples": 3}
    about = {"own-data": False, "classes": []}
    both = [MetricRecord(values) for values in (metrics, metrics | numbers)]
    whole, other = (RecordDict({codec.METRICS: each, codec.CONFIG: ConfigRecord(about)}) for each in both)
    assert Answer.read(10, whole, 3, 10).num_test == 3
    with pytest.raises(UserError):
        Answer.read(10, other, 3, 10)
