"""A stopped run resumes to the same model and the same logs as an uninterrupted one, bit for bit."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from helpers import config_of, same, slow
from messages import ROOT
from stopped import SMALL_RUN, equal, make_stopped_run, outcome, run_small

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.tensors import add_prefix, move
from contrafed.runs import checkpoint
from contrafed.runs.packing import pack, put_back, unpack
from contrafed.runs.run import run
from contrafed.strategies.fedavg import FedAvg
from contrafed.training.base import Client

LOG_OVERRIDE = "log=[deviation,weights,features,clients_train]"
# test_every.py resumes every unchanged method from its middle.
EACH_RUN = [
    ("pmfl", ()),
    slow("fedrcl", ("strategy.server=fedagm", "strategy.local.epochs=1")),
    slow("fedcrl", ("strategy.local.keep_optimizer=true",)),
]


@pytest.fixture
def stop_patched_run(tmp_path):
    """Return a stopped run of a method under a test's own changes of the code."""
    return lambda name: make_stopped_run(tmp_path / "run", f"strategy={name}")


@pytest.mark.parametrize(("name", "overrides"), EACH_RUN)
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, stop_run, name, overrides):
    config = (f"strategy={name}", *SMALL_RUN, *overrides)
    run(config_of(*config, f"output_dir={tmp_path}/whole"))
    folder = stop_run(name, *overrides)
    summary = run(config_of(*config, "resume=latest", f"output_dir={folder}"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["resume"] is None  # by which the whole run is repeated
    assert equal(outcome(folder), outcome(tmp_path / "whole"))
    assert summary["resumed_from"].endswith("000004")
    assert summary["rounds"] == 7


@pytest.mark.figures
def test_a_rule_that_chooses_by_its_state_goes_on_bit_for_bit(tmp_path, stop_patched_run, monkeypatch):
    """Earlier participants are read from the log, because another selection would change the state."""

    def select(self, server_round):
        here = self.participation.participants(server_round)
        waited = self.state.setdefault("waited", np.zeros(8))
        waited += generator(self.seed, "choice", server_round).random(8)
        chosen = here[np.argsort(-waited[here])[:2]]
        waited[chosen] = 0
        asked.append(server_round)
        return chosen

    asked = []
    monkeypatch.setattr(FedAvg, "select", select)
    run_small(f"{tmp_path}/whole", method="fedavg")
    assert asked == list(range(1, 8))  # once a round
    folder = stop_patched_run("fedavg")
    asked.clear()
    run_small(folder, "resume=latest", method="fedavg")
    assert asked == [5, 6, 7]
    assert equal(outcome(folder), outcome(tmp_path / "whole"))
    for name in ("participants.csv", "participation.png"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_table_by_client_goes_on_bit_for_bit(tmp_path, stop_patched_run, monkeypatch):
    """Every client continues from its last upload, which the server stores under its partition id."""

    def aggregate(self, model, replies):
        self.state.setdefault("own", {}).update({reply.client: reply.get_tensors("model") for reply in replies})
        return replies.mean("model", replies.num_examples) if len(replies) else model

    def per_client_broadcast(self, model, client, evaluating):
        own = self.state.get("own", {}).get(client)
        return None if evaluating or own is None else add_prefix("model", own)

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    monkeypatch.setattr(FedAvg, "per_client_broadcast", per_client_broadcast)
    run_small(f"{tmp_path}/whole", method="fedavg")
    folder = stop_patched_run("fedavg")
    run_small(folder, "resume=latest", method="fedavg")
    assert equal(outcome(folder), outcome(tmp_path / "whole"))
    monkeypatch.undo()
    run_small(f"{tmp_path}/plain", method="fedavg")
    assert not equal(outcome(tmp_path / "plain"), outcome(tmp_path / "whole"))


@pytest.mark.parametrize("engine", ["engine=local", slow("engine=ray engine.workers=1")])
def test_it_goes_on_from_a_path_elsewhere_and_on_another_engine(tmp_path, stop_run, whole, engine):
    folder = stop_run()
    before = outcome(folder)
    run_small(f"{tmp_path}/b", f"resume={folder}/checkpoints/000002", "checkpoint_every=2")
    assert equal(outcome(tmp_path / "b"), whole)
    assert equal(outcome(folder), before)
    shutil.rmtree(folder)  # the resumed folder does not need the first one
    run_small(f"{tmp_path}/c", *engine.split(), f"resume={tmp_path}/b/checkpoints/000004", "checkpoint_every=1")
    assert equal(outcome(tmp_path / "c"), whole)
    run_small(f"{tmp_path}/d", f"resume={tmp_path}/c/checkpoints/000006")
    assert equal(outcome(tmp_path / "d"), whole)


@pytest.mark.slow
def test_what_is_logged_when_asked_goes_on_too_and_in_ray(tmp_path, stop_run):
    asked = (LOG_OVERRIDE, "eval_clients=true")
    run_small(f"{tmp_path}/whole", *asked)
    folder = stop_run("pmfl", *asked)
    run_small(folder, *asked, "engine=ray", "engine.workers=2", "resume=latest")
    assert equal(outcome(folder), outcome(tmp_path / "whole"))
    logged = (folder / "metrics.csv").read_text() + (folder / "clients.csv").read_text()
    for name in ("deviation_mean", "features_vci", "weight_all", "train_loss"):
        assert f",{name}," in logged


def test_only_the_last_few_are_kept_and_files_of_unchanged_clients_are_shared(tmp_path):
    config = (
        "strategy=moon", *SMALL_RUN, "checkpoint_every=1", "checkpoint_keep=3", "participation=uniform",
        "participation.select=1",
    )  # fmt: skip
    config = [c for c in config if not c.startswith(("participation.mean", "participation.p01", "participation=markovian"))]
    run(config_of(*config, f"output_dir={tmp_path}/run"))
    folder = tmp_path / "run" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["000005", "000006", "000007", "clients"]
    used = {file for t in (5, 6, 7) for file in checkpoint.find(folder / f"{t:06d}").clients.values()}
    assert {p.name for p in (folder / "clients").iterdir()} == used
    rounds = {int(file.split("-")[1].split(".")[0]) for file in checkpoint.find(folder / "000007").clients.values()}
    assert len(rounds) > 1  # an absent client has the file of its last round


def test_what_was_read_stays_when_its_file_is_written_over(tmp_path):
    """Files are reused, and a loaded safetensors file is mapped. A later write must not change the client state in use."""

    def value(t):
        return {0: {"a": torch.full((5000,), float(t))}}

    keeper = checkpoint.Checkpoints(tmp_path, {"checkpoint_keep": 1}, None)
    keeper.save(1, {}, {}, value(1), {})
    keeper.wait()
    place = (tmp_path / "checkpoints" / "clients" / "0-1.safetensors").stat().st_ino
    read = dict(checkpoint.find(tmp_path).client_states())
    for t in (2, 3):
        keeper.save(t, {}, {}, value(t), {})
    keeper.wait()
    assert (tmp_path / "checkpoints" / "clients" / "0-3.safetensors").stat().st_ino == place
    assert same(read[0], value(1)[0])
    assert same(dict(checkpoint.find(tmp_path).client_states())[0], value(3)[0])
    keeper.close()
    assert [p.name for p in (tmp_path / "checkpoints" / "clients").iterdir()] == ["0-3.safetensors"]


def test_another_configuration_is_refused_by_its_keys(stop_run, expect_error):
    folder = stop_run()
    with expect_error("resume"):
        run_small(folder, "num_clients=9", "strategy.local.lr=0.2", "resume=latest")
    with pytest.raises(UserError, match=r"strategy=fedavg \(there: \w+\) and \d+ of its keys"):
        run_small(folder, "resume=latest", method="fedavg")


LATE_REPLIES = ("clock=lognormal", "participation.deadline=1", "participation.late=stale")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("fedrep", ()), ("fedavg", LATE_REPLIES), ("pmfl", ("strategy.history_share=0.5",))],
    ids=["heads that train for the last evaluation", "late replies", "a share that does not depend on the round"],
)
def test_a_finished_run_goes_on_to_other_rounds_bit_for_bit(tmp_path, name, overrides):
    """It repeats the rounds after the last checkpoint before its end, and equals a run of as many rounds."""
    run_small(f"{tmp_path}/whole", *overrides, method=name)
    run_small(f"{tmp_path}/run", *overrides, "num_rounds=4", "checkpoint_every=2", method=name)
    summary = run_small(f"{tmp_path}/run", *overrides, "checkpoint_every=2", "resume=latest", method=name)
    assert summary["resumed_from"].endswith("000002")
    assert equal(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))
    # The same for fewer rounds.
    run_small(f"{tmp_path}/five", *overrides, "num_rounds=5", method=name)
    run_small(f"{tmp_path}/cut", *overrides, "num_rounds=5", f"resume={tmp_path}/run/checkpoints/000004", method=name)
    assert equal(outcome(tmp_path / "cut"), outcome(tmp_path / "five"))


def test_where_a_run_cannot_go_on_to_more_rounds(tmp_path, stop_run, expect_error):
    with expect_error("resume"):  # its history's share depends on the number of rounds
        run_small(stop_run(), "num_rounds=9", "resume=latest")
    run_small(f"{tmp_path}/fedavg", "num_rounds=4", "checkpoint_every=4", method="fedavg")
    with expect_error("resume"):
        run_small(f"{tmp_path}/fedavg", "resume=latest", method="fedavg")
    run_small(f"{tmp_path}/more", "checkpoint_every=2", method="fedavg")
    with expect_error("resume"):
        run_small(f"{tmp_path}/more", "num_rounds=5", "resume=latest", method="fedavg")


def test_what_says_which_replies_count_may_not_differ(stop_run, expect_error):
    with expect_error("resume"):
        run_small(stop_run(), "engine.max_norm=0.5", "resume=latest")


def test_logs_that_do_not_reach_the_checkpoint_are_one_line(stop_run, expect_error):
    folder = stop_run()
    log = folder / "metrics.csv"
    log.write_bytes(log.read_bytes()[:40])
    with expect_error("resume"):
        run_small(folder, "resume=latest")
    log.unlink()
    with expect_error("resume"):
        run_small(f"{folder}-2", f"resume={folder}/checkpoints/000004")
    assert not Path(f"{folder}-2").exists()


def test_latest_never_overwrites_another_run(tmp_path, expect_error):
    run_small(f"{tmp_path}/run", method="fedavg")
    before = outcome(tmp_path / "run")
    for name in ("fedavg", "fedprox"):
        with expect_error("resume"):
            run(config_of(f"strategy={name}", *SMALL_RUN, "resume=latest", f"output_dir={tmp_path}/run"))
    (tmp_path / "run" / "summary.json").unlink()  # as if killed before its first checkpoint
    with expect_error("resume"):
        run_small(f"{tmp_path}/run", "resume=latest", method="fedprox")
    run_small(f"{tmp_path}/run", "resume=latest", method="fedavg")
    assert equal(outcome(tmp_path / "run"), before)


def test_personal_models_of_a_finished_run_can_still_be_saved(tmp_path, capsys):
    first = run_small(f"{tmp_path}/run", "checkpoint_every=7", method="fedper")
    run_small(f"{tmp_path}/b", f"resume={tmp_path}/run", "save_personal=true", method="fedper")
    assert "no client took part" not in capsys.readouterr().out
    again = run(config_of(f"evaluate_only={tmp_path}/b", "engine=local", f"output_dir={tmp_path}/c"))
    assert again["personal_accuracy_mean"] == first["personal_accuracy_mean"]


@pytest.mark.slow
def test_a_finished_run_sends_what_its_last_round_sent_to_models_that_are_saved_after_it(tmp_path):
    """FedProc's mix depends on the round. Clients that train before evaluation save the models of the last evaluation."""
    proc = ("strategy=fedproc", "evaluate_after=local_training", *SMALL_RUN)
    run(config_of(*proc, "checkpoint_every=7", f"output_dir={tmp_path}/run"))
    run(config_of(*proc, f"resume={tmp_path}/run", "save_personal=true", f"output_dir={tmp_path}/b"))
    run(config_of(f"evaluate_only={tmp_path}/b", "engine=local", f"output_dir={tmp_path}/c"))
    lines = [(tmp_path / place / "metrics.csv").read_text().splitlines() for place in ("run", "c")]
    left, scored = (
        [line.split(",")[-1] for line in of if line.split(",")[1:4] == ["personal", "test", "loss"]][-1] for of in lines
    )
    assert left == scored


def test_model_and_memory_come_back_in_their_order(stop_patched_run, monkeypatch):
    models, client_states, aggregate, sent = [], [], FedAvg.aggregate, Client.make_upload
    monkeypatch.setattr(FedAvg, "aggregate", lambda *given: models.append(list(given[1])) or aggregate(*given))
    monkeypatch.setattr(Client, "make_upload", lambda *given: client_states.append(list(given[1].state)) or sent(*given))
    folder = stop_patched_run("fedper")
    before = len(models)
    run_small(folder, "checkpoint_every=2", "resume=latest", method="fedper")
    assert 0 < before < len(models)
    assert client_states[0] == [f"personal/{name}" for name in models[0] if name.startswith("classifier.")]
    assert all(order in (models[0], client_states[0]) for order in models + client_states)


def test_where_there_is_no_checkpoint(tmp_path, capsys, expect_error):
    with expect_error("resume"):
        run(config_of(*SMALL_RUN, "resume=lastest", f"output_dir={tmp_path}/run"))
    with expect_error("resume"):
        run(config_of(*SMALL_RUN, "resume=nowhere", f"output_dir={tmp_path}/run"))
    assert not (tmp_path / "run").exists()
    run(config_of(*SMALL_RUN, "resume=latest", f"output_dir={tmp_path}/run"))
    assert "beginning with round 1" in capsys.readouterr().out
    # A run that failed, in whose summary the word stands for something else.
    (tmp_path / "run" / "summary.json").write_text('{"status": "failed", "experiment": "finished"}')
    run(config_of(*SMALL_RUN, "resume=latest", f"output_dir={tmp_path}/run"))
    assert "beginning with round 1" in capsys.readouterr().out
    with expect_error("engine"):
        run(config_of(*SMALL_RUN, "engine=flower", "checkpoint_every=2", f"output_dir={tmp_path}/f"))


def left_of(session):
    """Return the remaining processes of a session, such as Ray's."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            found += [place.name] if int(fields[3]) == session and fields[0] != "Z" else []
    return found


def rows_of(log):
    return log.read_bytes().count(b"\n") if log.exists() else 0


def killed_until_done(folder, overrides, kills, rng):
    """Run the command until it finishes, and kill its main process ``kills`` times at random moments."""
    command = [sys.executable, "main.py", *overrides, "checkpoint_every=1", "resume=latest", f"output_dir={folder}"]
    log, sessions = folder / "metrics.csv", []
    for _ in range(kills):
        before = rows_of(log)
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        ends = time.monotonic() + 300
        # Past the last attempt's rounds, so that the kill is during rounds and not at the start.
        while process.poll() is None and time.monotonic() < ends and rows_of(log) <= before:
            time.sleep(0.005)
        time.sleep(rng.random() * 0.1)
        assert process.poll() is None, f"over before it could be killed, at {rows_of(log)} rows"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        sessions.append(process.pid)
    subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.DEVNULL)
    # Two of Ray's processes take a minute to close their ports after its others are gone.
    ends = time.monotonic() + 90
    while any(map(left_of, sessions)) and time.monotonic() < ends:
        time.sleep(0.1)
    assert [left for session in sessions for left in left_of(session)] == []


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_sigkill_at_random_moments(tmp_path, engine):
    """It takes about 300 core seconds: 500 rounds, and 21 starts of the command."""
    kills, rounds = 20, 250
    overrides = [
        "strategy=pmfl", *SMALL_RUN, f"engine={engine}", f"num_rounds={rounds}", "partition.min_client_size=5", LOG_OVERRIDE,
    ]  # fmt: skip
    run(config_of(*overrides, f"output_dir={tmp_path}/whole"))
    killed_until_done(tmp_path / "run", overrides, kills, random.Random(kills))
    assert equal(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


def test_state_survives_packing():
    state = {
        "array": np.arange(3),
        "scalar": np.float64(2.5).item(),
        "nested": {"list": [{"w": torch.ones(2)}, {"w": torch.zeros(2)}], "none": None, "text": np.str_("a/b")},
        "empty": {"list": [], "dict": {}},
        "by client": {3: {"w": torch.full((2,), 3.0)}, 10: {"w": torch.zeros(2)}, "3": 5, np.int64(4): 1},
        "a": {"b": torch.ones(1)},
        "a/b": torch.zeros(1),
    }
    tensors = {}
    packed = json.loads(json.dumps(pack(state, "state", tensors)))
    again = unpack(packed, tensors)
    assert again["array"].tolist() == [0, 1, 2]
    again["array"] += 1  # a separate array
    assert state["array"].tolist() == [0, 1, 2]
    assert again["nested"]["list"][0]["w"].tolist() == [1, 1]
    assert (again["scalar"], again["nested"]["none"], again["nested"]["text"]) == (2.5, None, "a/b")
    assert again["empty"] == {"list": [], "dict": {}}
    assert list(again["by client"]) == [3, 10, "3", 4]
    assert all(type(key) is int for key in again["by client"] if key != "3")
    assert (again["by client"][3]["w"].tolist(), again["by client"]["3"]) == ([3, 3], 5)
    assert (again["a"]["b"].tolist(), again["a/b"].tolist()) == ([1], [0])
    with pytest.raises(TypeError, match="cannot hold object"):
        pack({"x": object()}, "state", {})
    with pytest.raises(TypeError, match="keys are text or whole numbers, not 1.5"):
        pack({1.5: 0}, "state", {})


@pytest.mark.parametrize("value", [(1, (2.5, "x")), np.float32(0.1), np.int8(3), np.bool_(True), np.float64(0.1)], ids=repr)
def test_a_state_comes_back_with_its_types(value):
    tensors = {}
    again = unpack(json.loads(json.dumps(pack({"x": [value]}, "state", tensors))), tensors)["x"][0]
    assert (again, type(again)) == (value, type(value))


def test_tables_of_the_state_stay_those_that_a_rule_holds():
    """Also after a move to a GPU, or back from a checkpoint."""
    table = {3: torch.ones(1)}
    state = {"groups": {"first": table, "list": [{"w": torch.ones(2)}]}, "count": 1}
    move(state, torch.device("meta"))
    assert table is state["groups"]["first"]
    assert table[3].is_meta
    assert state["groups"]["list"][0]["w"].is_meta
    put_back(state, {"groups": {"first": {4: torch.zeros(1)}, "list": []}, "count": 2})
    assert table is state["groups"]["first"]
    assert table == {4: torch.zeros(1)}
    assert (state["groups"]["list"], state["count"]) == ([], 2)
