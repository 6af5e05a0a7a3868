"""Devices with wrong options, other data, a lost state or odd replies: a reply and a line, and never a wrong number."""

import json
import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wire
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from test_client_faults import with_tensors
from test_device_checkpoints import clients
from wire import RUN, Wire, answers_but, plain, rows_of, run_devices

from contrafed.core import codec
from contrafed.core.errors import UserError
from contrafed.engines.client_answer import Answer
from contrafed.engines.device_grid import DeviceGrid
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run
from contrafed.training.workspace import uninstall

pytestmark = pytest.mark.usefixtures("quick_devices")


def trains(message, server_round):
    return message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == str(server_round)


def saying(reply, **words):
    about = ConfigRecord({**codec.config_of(reply), **words})
    return Message(RecordDict({**reply.content, codec.CONFIG: about}), metadata=reply.metadata)


def evaluate_run(folder, run_id, of):
    config = compose_deployed_run(f"evaluate_only={of} output_dir={folder}/scored-{run_id}")
    return serve(DeviceGrid(clients(folder, run_id), run_id, 5), config)


def test_a_double_that_no_float32_holds_costs_its_reply(tmp_path):
    """The value is finite on arrival, but the model made of it is not."""

    def enlarge(message, reply):
        sent = codec.state_of(reply.content, codec.ARRAYS)
        return with_tensors(reply, {name: torch.full(v.shape, 1e60, dtype=torch.float64) for name, v in sent.items()})

    *_, summary = run_devices(tmp_path / "run", Wire(*plain(), change=answers_but(1, "2", enlarge)), "strategy=fedavg")
    assert (summary["status"], summary["replies_rejected"]) == ("finished", 1)


def test_a_client_that_reads_other_examples_than_the_server_is_named(tmp_path, capsys):
    other = answers_but(2, None, lambda message, reply: saying(reply, fingerprint="0123456789abcdef"), "query")
    run_devices(tmp_path / "run", Wire(*plain(), change=other), "strategy=fedavg")
    lines = [line for line in capsys.readouterr().out.splitlines() if "other examples than the server" in line]
    assert [line.partition(" reads")[0] for line in lines] == ["client of partition 2"]


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_damaged_summary_of_the_run_to_score_is_a_line(tmp_path, content, expect_error):
    run_devices(tmp_path / "run", clients(tmp_path, 1), "strategy=fedcrl", "save_personal=true")
    (tmp_path / "run" / "summary.json").write_text(content)
    with expect_error():
        evaluate_run(tmp_path, 2, tmp_path / "run")


def test_models_that_no_client_kept_are_not_scored(tmp_path):
    run_devices(tmp_path / "run", clients(tmp_path, 1), "strategy=fedcrl")
    with pytest.raises(
        UserError, match=f"^evaluate_only: the clients of {tmp_path}/run kept no personal models; the run needs "
    ):
        evaluate_run(tmp_path, 2, tmp_path / "run")


def test_clients_that_do_not_score_what_they_kept_are_failures(tmp_path):
    run_devices(tmp_path / "run", clients(tmp_path, 1), "strategy=fedcrl", "save_personal=true")
    (tmp_path / "state0" / "personal" / "1" / "0.safetensors").unlink()
    assert evaluate_run(tmp_path, 2, tmp_path / "run")["failures"] == 1


def test_a_device_that_is_started_again_as_another_partition_trains_nothing(tmp_path, capsys):
    """Under its key it keeps its id, by which its replies are stored."""

    def change(message, reply):
        grid.contexts[1].node_config["partition-id"] = 2
        return reply

    grid = clients(tmp_path, 1, answers_but(2, "1", change))
    *_, summary = run_devices(tmp_path / "run", grid, "strategy=moon", "num_rounds=3")
    assert summary["failures"] >= 2
    assert "--node-config says partition-id=2, but this run knows the client as 1" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "state1" / "client_state").glob("1-*.safetensors")] == ["1-1.safetensors"]


def test_a_device_that_holds_other_data_than_before_does_not_go_on(tmp_path, monkeypatch):
    def data(k, count):
        x = np.random.default_rng(k).integers(0, 255, (count, 8, 8), dtype=np.uint8)
        np.savez(tmp_path / f"{k}.npz", x=x, y=np.arange(count) % 4)

    def ends(k, message, reply):
        if trains(message, 3):
            raise KeyboardInterrupt
        return reply

    for k in range(3):
        data(k, 40)
    own = ("partition=own", "dataset=own", "dataset.height=8", "dataset.width=8", "dataset.num_classes=4")
    how = ("strategy=fedavg", *own, "num_rounds=4", "checkpoint_every=2", "resume=latest")
    monkeypatch.setattr(wire, "SMALL_RUN", [override for override in wire.SMALL_RUN if not override.startswith("partition.")])
    with pytest.raises(KeyboardInterrupt):
        run_devices(tmp_path / "run", Wire(*plain(data=f"{tmp_path}/{{k}}.npz"), change=ends, run_id=1), *how)
    data(1, 80)
    uninstall()
    with pytest.raises(
        UserError, match=r"^client of partition 1 holds other examples than when the run began: begin a new one"
    ):
        run_devices(tmp_path / "run", Wire(*plain(data=f"{tmp_path}/{{k}}.npz"), run_id=2), *how)


def test_a_client_whose_class_folders_have_other_names_holds_other_examples():
    """With equal counts, equal labels would be other classes."""
    named = ((1, ["cat", "owl"]), (2, ["dog", "owl"]), (3, []))
    was, renamed, unnamed = (Answer(client, 0, np.array([4, 4]), 2, True, names) for client, names in named)
    assert renamed.other_examples(was)
    assert not unnamed.other_examples(was)
    assert not was.other_examples(Answer.away(json.loads(json.dumps(was.to_json()))))
    assert renamed.other_examples(Answer.away(was.to_json()))


def test_a_client_whose_memory_is_lost_keeps_no_personal_model(tmp_path, capsys):
    """A finished run is read again for its personal models after its state was removed. They would be untrained."""
    how = ("strategy=fedcrl", "num_rounds=4", "checkpoint_every=2", "save_personal=true", "resume=latest")
    run_devices(tmp_path / "run", clients(tmp_path, 1), *how)
    for file in tmp_path.glob("state*/client_state/*"):
        file.unlink()
    capsys.readouterr()
    run_devices(tmp_path / "run", clients(tmp_path, 3), *how)
    assert capsys.readouterr().out.count("begins with an empty client state") == 3
    for k in range(3):
        kept = [path.parent.name for path in (tmp_path / f"state{k}" / "personal").glob("*/*.safetensors")]
        assert sorted(kept) == ["1", "1-best"]  # of the first run


def test_a_run_that_is_stopped_has_spent_what_was_sent_in_its_last_round(tmp_path):
    pytest.importorskip("dp_accounting", reason="the accountant comes with the extra dp")

    def end(message, reply):
        raise SystemExit(0)  # as Flower has it end

    with pytest.raises(SystemExit):
        run_devices(tmp_path / "run", Wire(*plain(), change=answers_but(2, "3", end)), "strategy=fedavg", "privacy=local")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["privacy_rounds"]) == ("interrupted", 2, 3)


def test_what_clients_say_is_shown_without_what_a_terminal_obeys(tmp_path, capsys):
    odd = "x\x1b[2J\x1b]0;owned\x07\nround 3: all is well"

    def change(k, message, reply):
        if k == 1 and trains(message, 2):
            return saying(reply, **{codec.DIVERGED: odd})
        return saying(reply, refused=odd) if refuses and message.metadata.message_type == MessageType.QUERY else reply

    refuses = False
    _, metrics, *_ = run_devices(tmp_path / "run", Wire(*plain(), change=change), "strategy=fedavg")
    assert rows_of(metrics, "replies_rejected")[2] == 1
    refuses = True
    with pytest.raises(UserError, match="cannot participate: x ") as found:
        run_devices(tmp_path / "other", Wire(*plain(), change=change), "strategy=fedavg")
    shown = capsys.readouterr().out + str(found.value)
    assert not {"\x1b", "\x07"} & set(shown)
    assert "\nround 3: all is well" not in shown


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
    assert f"round 2: 1 client failed; the first: {who}" in said
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
