"""Metrics in trackers, as well as in the CSV files."""

import importlib.util
import json
import struct
import time
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import pytest
from helpers import config_of, read_rows
from tiny import TINY_RUN

from contrafed.config.run_config import resolve
from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.tracker import Tracked, Tracker
from contrafed.runs.run import run
from contrafed.runs.trackers import Followed
from contrafed.runs.trackers.tensorboard import TensorBoard

SMALL_RUN = (*TINY_RUN, "num_rounds=2", "participation=full", "engine=local", "strategy=fedavg")


def run_tracked(folder, *overrides):
    """Run with a tracker, and return the rows of its metrics.csv as (name, round) -> value."""
    assert run(config_of(*SMALL_RUN, f"output_dir={folder}", *overrides))["status"] == "finished"
    rows = read_rows(folder / "metrics.csv")
    return {(f"{r['scope']}/{r['split']}/{r['metric']}", int(r["round"])): float(r["value"]) for r in rows}


def test_tensorboard_holds_what_the_csv_does_and_its_command_is_printed(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = run_tracked(tmp_path / "a run")
    assert f"to follow it: tensorboard --logdir '{tmp_path}/a run/tensorboard'\n" in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "a run" / "tensorboard")).Reload()
    found = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    assert found == pytest.approx(expected)


def test_tensorboard_of_a_run_that_resumes_elsewhere_has_all_rounds(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_tracked(tmp_path / "a", "checkpoint_every=1")
    rounds = config_of(*SMALL_RUN)["num_rounds"]
    expected = run_tracked(tmp_path / "b", f"resume={tmp_path}/a", f"num_rounds={rounds + 1}")
    events = EventAccumulator(str(tmp_path / "b" / "tensorboard")).Reload()
    found = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    assert found == pytest.approx(expected)


def test_without_a_tracker_the_csv_is_the_same(tmp_path, capsys):
    run_tracked(tmp_path / "none", "tracker=none")
    assert "to follow it" not in capsys.readouterr().out
    assert not (tmp_path / "none" / "tensorboard").exists()
    run_tracked(tmp_path / "with")
    assert (tmp_path / "none" / "metrics.csv").read_bytes() == (tmp_path / "with" / "metrics.csv").read_bytes()


@dataclass(frozen=True)
class Config:
    """No settings."""


def choice_of(tracker):
    module = ModuleType("mine")
    tracker.__module__, module.Mine, module.Config = "mine", tracker, Config
    return Choice("mine", module, Config(), {})


def test_a_tracker_that_fails_costs_no_run(tmp_path, capsys):
    class Failing(Tracker):
        calls: ClassVar = []

        def log(self, server_round, values):
            self.calls.append(server_round)
            raise OSError("the server\nis gone")

    said = []
    followed = Followed(choice_of(Failing), Tracked(tmp_path, {}, False))
    for t in range(3):
        followed.log(t, {"a": 1.0}, said.append)
    followed.close("finished")
    assert Failing.calls == [0]
    assert said == ["tracker=mine failed and is left alone, metrics.csv has everything: OSError: the server is gone"]


def test_a_tracker_that_cannot_begin_is_a_line(tmp_path, expect_error):
    class Closed(Tracker):
        def __init__(self, config, run):
            raise ValueError("no key")

    with expect_error("tracker"):
        Followed(choice_of(Closed), Tracked(tmp_path, {}, False))


def test_a_tracker_that_cannot_begin_leaves_no_folder_and_a_finished_run_as_it_is(tmp_path, monkeypatch, expect_error):
    def refuse_start(self, config, run):
        raise ValueError("no key")

    config = config_of(*SMALL_RUN, f"output_dir={tmp_path / 'run'}", "checkpoint_every=1")
    with monkeypatch.context() as change:
        change.setattr(TensorBoard, "__init__", refuse_start)
        with expect_error("tracker"):
            run(config)
    assert not (tmp_path / "run").exists()
    run(config)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    monkeypatch.setattr(TensorBoard, "__init__", refuse_start)
    with expect_error("tracker"):
        run({**config, "resume": "latest"}, unique=False)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_whose_package_is_missing_is_a_line(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=rf"^tracker={name}\b.*pip install {name}$"):
        resolve(config_of(*SMALL_RUN, f"tracker={name}"))


def needs(*packages):
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"optional packages that are not installed: {', '.join(missing)}")


def records_of(content):
    """Return the records of a LevelDB log, as wandb writes it: 7 bytes of header, then parts within blocks of 32 KiB."""
    place, whole = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        whole, place = whole + content[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


@pytest.mark.slow
@needs("wandb")
def test_wandb_keeps_a_run_offline(tmp_path, capsys):
    from wandb.proto.wandb_internal_pb2 import Record

    expected = run_tracked(tmp_path / "run", "tracker=wandb")
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert f"to follow it: wandb sync {kept}\n" in capsys.readouterr().out
    assert kept.name.endswith((tmp_path / "run" / "wandb.id").read_text())
    # wandb's own process writes the end of the file a moment after the run is finished.
    end = time.monotonic() + 20
    while "all finished" not in (kept / "logs" / "debug-internal.log").read_text() and time.monotonic() < end:
        time.sleep(0.1)
    (file,) = kept.glob("*.wandb")
    found = {}
    for data in records_of(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        found |= {(name, row["_step"]): value for name, value in row.items() if not name.startswith("_")}
    assert found == pytest.approx(expected)


@pytest.mark.slow
@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_keeps_a_run_in_a_file_and_goes_on_with_it(tmp_path, capsys):
    from mlflow import MlflowClient

    """It goes on from round 2 of 3 logged rounds, so that round 3 is run twice."""
    stopped = lambda t, values: (_ for _ in ()).throw(KeyboardInterrupt) if t == 3 else None  # noqa: E731
    settings = (*SMALL_RUN, "num_rounds=4", "tracker=mlflow", "checkpoint_every=2", f"output_dir={tmp_path}/run")
    with pytest.raises(KeyboardInterrupt):
        run(config_of(*settings), on_round=stopped)
    expected = run_tracked(tmp_path / "run", "num_rounds=4", "tracker=mlflow", "checkpoint_every=2", "resume=latest")
    store = f"sqlite:///{tmp_path}/run/mlflow.db"
    assert f"to follow it: mlflow ui --backend-store-uri {store}\n" in capsys.readouterr().out
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("contrafed")
    (one,) = client.search_runs([experiment.experiment_id])
    assert (one.info.run_name, one.info.status, one.data.params["strategy.name"]) == ("run", "FINISHED", "fedavg")
    logged = [((n, m.step), m.value) for n in one.data.metrics for m in client.get_metric_history(one.info.run_id, n)]
    assert len(logged) == len(expected)
    assert dict(logged) == pytest.approx(expected)
