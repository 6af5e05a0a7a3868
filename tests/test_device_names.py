"""What operators read of devices: names and partitions in place of Flower's ids, and a line per round."""

import logging
import re
from types import SimpleNamespace

import pytest
from test_devices import answers_but
from wire import RUN, Wire, plain, run_devices

from contrafed.core.errors import UserError

NAMES = {10: "attic", 11: "kitchen", 12: ""}


class Named(Wire):
    """Devices that were registered with a name, but for the last."""

    def get_nodes(self):
        return [SimpleNamespace(node_id=node_id, name=NAMES[node_id]) for node_id in self.get_node_ids()]


def fail(k, message, reply):
    raise ValueError("cannot be read")


@pytest.mark.parametrize(("client", "who"), [(1, "client 1 'kitchen': "), (2, "client 2: ")])
def test_a_fault_names_the_partition_and_the_client(tmp_path, capsys, client, who):
    wire = Named(*plain(), change=answers_but(client, "2", lambda message, reply: fail(client, message, reply)))
    run_devices(tmp_path / "run", wire, "strategy=fedavg", "eval_every=10")
    said = capsys.readouterr().out
    assert f"round 2: 1 reply did not count; the first: {who}" in said
    assert str(10 + client) not in re.findall(r"\d+", said.partition("the first: ")[2].splitlines()[0])


@pytest.mark.parametrize(("client", "who"), [(1, "client 'kitchen' of partition 7 "), (2, "client of partition 7 ")])
def test_a_client_that_is_refused_is_named(tmp_path, client, who):
    configs = plain()
    configs[client] = {"partition-id": 7}
    with pytest.raises(UserError) as refused:
        run_devices(tmp_path / "run", Named(*configs), "strategy=fedavg")
    assert str(refused.value).startswith(who)


def test_a_devices_log_has_a_line_per_round(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(logging.getLogger("flwr"), "info", lambda text, *values: lines.append(text % values))
    run_devices(tmp_path / "run", Named(*plain()), "strategy=fedavg", "eval_clients=true")
    for server_round in (1, 2, 3):
        place = rf"partition 1, run {RUN}, round {server_round}: "
        trained = [line for line in lines if re.fullmatch(place + r"trained on \d+ examples, loss \d+\.\d+, \d+\.\d s", line)]
        scored = [line for line in lines if re.match(place + r"evaluated on \d+ examples, ", line)]
        assert (len(trained), len(scored)) == (1, 1)


def test_a_resumed_run_says_from_which_round(tmp_path, capsys):
    asked = ("strategy=fedavg", "num_rounds=3", "checkpoint_every=2", "resume=latest")
    for _ in range(2):
        capsys.readouterr()
        run_devices(tmp_path / "run", Wire(*plain()), *asked)
    assert "resumed after round 2 of 3, from " in capsys.readouterr().out
