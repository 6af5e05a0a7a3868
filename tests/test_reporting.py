"""A run's files: separate folders, readable files, summaries by hand, and figures with content."""

import json
import logging
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import flwr
import numpy as np
import pytest
import torch
from helpers import read_rows, slow
from matplotlib import image
from safetensors import safe_open

from contrafed.runs.output import (
    Progress,
    RunRecorder,
    claim_folder,
    figures,
    print_summary,
    provenance,
    quiet_libraries,
    versions,
)
from contrafed.runs.output.series import ema, moving_average, summary_of_curves, top_k_mean

pytestmark = pytest.mark.figures


def test_series_by_hand():
    assert top_k_mean([1, 5, 3, 5, 4, 2, 6]) == pytest.approx(4.6)
    assert top_k_mean([2, 4]) == 3
    assert math.isnan(top_k_mean([]))
    assert ema([(1, 0), (2, 10), (3, 10)], 0.9) == pytest.approx({1: 0, 2: 1.0, 3: 1.9})
    assert ema([(1, 0), (3, 10)], 0.9) == pytest.approx({1: 0, 3: 1.9})  # as if round 2 had had round 3's
    assert ema([(1, 3), (7, 3), (8, 3)], 0.9) == pytest.approx({1: 3, 7: 3, 8: 3})
    assert moving_average([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]
    assert moving_average([1, 2, 6], 20) == [1, 1.5, 3]


def test_summary_of_curves_by_hand():
    points = [(0, 0.9), (1, 0.2), (2, 0.6), (3, 0.4)]
    curves = {("global", "test", "accuracy"): points, ("personal", "test", "accuracy"): points}
    curves[("personal", "test", "accuracy_std")] = [(0, 0.0), (1, 0.03), (2, 0.02), (3, 0.01)]
    summary = summary_of_curves(curves)
    assert (summary["accuracy_final"], summary["accuracy_best"]) == (0.4, 0.6)
    own = [summary[f"personal_accuracy_{name}"] for name in ("best", "best_std", "mean", "std", "last10_mean")]
    assert own == pytest.approx([0.6, 0.02, 0.4, 0.01, 0.4])
    assert "train_accuracy_final" not in summary
    tuned = summary_of_curves(curves | {("personal", "test", "untuned/accuracy"): [(3, 0.1)]})
    assert (tuned["personal_accuracy_mean"], tuned["personal_accuracy_last10_mean"]) == (0.4, pytest.approx(0.3))
    assert math.isnan(summary_of_curves({})["accuracy_final"])


def test_where_a_run_was_made():
    assert re.fullmatch(r".*\S, \d+ cores?", provenance.hardware("cpu"))
    assert {"contrafed", "python", "flwr", "torch"} <= set(versions())
    assert versions()["flwr"] == flwr.__version__
    assert provenance.commit() is None or re.fullmatch(r"[0-9a-f]{12}\+?", provenance.commit())


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, partial(ProcessPoolExecutor, mp_context=get_context("forkserver"))])
def test_simultaneous_runs_never_share_a_folder(tmp_path, kind):
    with kind(8) as pool:
        claimed = list(pool.map(partial(claim_folder, unique=True), [tmp_path / "run"] * 24))
    assert sorted(path.name for path in claimed) == sorted(["run", *(f"run-{i}" for i in range(2, 25))])


def test_the_current_folder_can_be_claimed_and_numbered(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    claim_folder(Path("."), unique=True)
    assert claim_folder(Path("."), unique=True) == tmp_path / "here-2"


def test_a_taken_or_impossible_folder_is_one_line(tmp_path, expect_error):
    claim_folder(tmp_path / "run", unique=False)
    with expect_error("output_dir"):
        claim_folder(tmp_path / "run", unique=False)
    (tmp_path / "file").write_text("")
    for unique in (True, False):
        with expect_error("output_dir"):
            claim_folder(tmp_path / "file" / "run", unique=unique)
        with expect_error("output_dir"):
            claim_folder(tmp_path / "file", unique=unique)


def record(folder, accuracies=(0.1, 0.4, 0.6, 0.5), upto=None):
    folder.mkdir()
    recorder = RunRecorder(folder, "seed: 0\n")
    recorder.partition(np.arange(30).reshape(6, 5))
    for t, accuracy in enumerate(accuracies):
        recorder.metric(t, "global", "test", "accuracy", accuracy)
        if t:
            recorder.participants(t, np.array([t % 6, 5]), 6)
            recorder.metric(t, "global", "system", "bytes_up", 100)
            recorder.metric(t, "global", "system", "failures", 1)
            recorder.clients(t, [3, 4], "weight", [1.0, 1 / 3])
            recorder.time(t, 0.25, 0.05)
        recorder.flush()
    return recorder


def test_files_hold_what_was_recorded_at_every_flush(tmp_path):
    record(tmp_path / "run")  # not closed: a killed run
    rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert rows[:2] == ["round,scope,split,metric,value", "0,global,test,accuracy,0.1"]
    assert "1,global,system,participants,2" in rows
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines()[1:3] == [
        "1,3,weight,1.0",
        "1,4,weight,0.3333333333333333",
    ]
    assert (tmp_path / "run" / "times.csv").read_text().splitlines()[1] == "1,0.250000,,,,,0.050000,"


def test_a_run_that_goes_on_has_the_seconds_of_all_sittings_and_no_summary_of_the_last(tmp_path):
    first = record(tmp_path / "run")
    first.finish("interrupted", {"seconds": 9.0})
    sizes = first.sizes()
    first.close()
    again = RunRecorder(tmp_path / "run", "seed: 0\n", logs=sizes)
    assert not (tmp_path / "run" / "summary.json").exists()
    again.participants(4, np.array([0]), 6)
    summary = again.finish("finished", {"seconds": 1.0})
    again.close()
    assert (summary["seconds"], summary["seconds_per_round"]) == (1.75, 1.75 / 4)  # three rounds of a quarter second
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")) == []


def test_summary_by_hand(tmp_path):
    recorder = record(tmp_path / "run")
    recorder.metric(3, "personal", "test", "accuracy", 0.7)
    recorder.metric(3, "personal", "test", "accuracy_std", 0.05)
    recorder.metric(2, "global", "train", "accuracy", 0.8)
    summary = recorder.finish("finished", {"method": "pmfl", "seconds": 6.0, "odd": float("nan")})
    recorder.close()
    assert summary["train_accuracy_final"] == 0.8
    assert summary["accuracy_final"] == 0.5
    assert summary["accuracy_best"] == 0.6
    assert summary["accuracy_top5_mean"] == pytest.approx(0.5)  # the initial 0.1 is no evaluation point of the run
    assert summary["accuracy_ema"] == pytest.approx(0.9 * (0.9 * 0.4 + 0.1 * 0.6) + 0.1 * 0.5)
    assert (summary["personal_accuracy_mean"], summary["personal_accuracy_std"]) == (0.7, 0.05)
    assert (summary["bytes_up"], summary["failures"], summary["rounds"]) == (300, 3, 3)
    assert summary["seconds_per_round"] == 2.0

    def refuse(name):
        raise AssertionError(name)

    written = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    assert written["odd"] is None
    assert written == summary
    assert written["method"] == "pmfl"


def test_the_moving_average_is_reported_at_rounds_500_and_1000_too(tmp_path):
    recorder = RunRecorder(tmp_path, "")
    for t in range(1, 1006):
        recorder.metric(t, "global", "test", "accuracy", float(495 < t <= 995))
    summary = recorder.finish("finished", {})
    recorder.close()
    assert summary["accuracy_ema_500"] == pytest.approx(1 - 0.9**5)
    assert summary["accuracy_ema_1000"] == pytest.approx(0.9**5)
    assert summary["accuracy_ema"] == pytest.approx(0.9**10)


def test_a_summary_takes_what_json_does_not(tmp_path):
    recorder = record(tmp_path / "run")
    extra = {"path": Path("x"), "flag": np.bool_(True), "array": np.array([1.0, np.inf]), 3: np.int64(4), "no": None}
    summary = recorder.finish("finished", extra)
    recorder.close()
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    assert [summary[key] for key in ("path", "flag", "array", "3", "no")] == ["x", True, [1.0, None], 4, None]


def test_an_interrupted_run_leaves_everything_so_far(tmp_path):
    recorder = record(tmp_path / "run", accuracies=(0.1, 0.4))
    recorder.metric(2, "global", "fit", "loss", 1.5)  # the round that was cut
    summary = recorder.finish("interrupted", {})
    recorder.close()
    assert (summary["status"], summary["rounds"], summary["accuracy_final"]) == ("interrupted", 1, 0.4)
    assert (tmp_path / "run" / "metrics.csv").read_text().endswith("2,global,fit,loss,1.5\n")
    for name in ("accuracy.png", "participation.png", "partition.png"):
        assert ink(tmp_path / "run" / name) > 0.005


def test_names_with_commas_stay_one_cell(tmp_path):
    recorder = record(tmp_path / "run", accuracies=())
    recorder.metric(1, "global", "fit", 'mean, "raw"', 1.0)
    recorder.clients(1, [7], "a,b", [2.0])
    recorder.close()
    assert read_rows(tmp_path / "run" / "metrics.csv")[-1]["metric"] == 'mean, "raw"'
    assert read_rows(tmp_path / "run" / "clients.csv")[-1] == {"round": "1", "client": "7", "metric": "a,b", "value": "2.0"}


def test_a_run_that_ended_before_its_first_round_has_a_summary(tmp_path):
    (tmp_path / "run").mkdir()
    recorder = RunRecorder(tmp_path / "run", "")
    recorder.finish("interrupted", {})
    recorder.close()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["accuracy_final"], summary["rounds"]) == ("interrupted", None, 0)


def test_unknown_scopes_are_refused(tmp_path):
    recorder = record(tmp_path / "run")
    with pytest.raises(ValueError, match="unknown scope 'world'"):
        recorder.metric(1, "world", "test", "accuracy", 1.0)


def test_participation_of_a_million_clients_is_kept_small(tmp_path):
    (tmp_path / "run").mkdir()
    recorder = RunRecorder(tmp_path / "run", "")
    recorder.participants(1, np.arange(0, 1_000_000, 10_000), 1_000_000)
    assert len(recorder._shown) == 200
    ((count, rows),) = recorder._seen
    assert count == 100
    assert len(rows) <= 200
    recorder.close()


def test_models_are_saved_as_safetensors(tmp_path):
    recorder = record(tmp_path / "run")
    weights = torch.randn(4, 3).T
    recorder.save_model({"encoder.w": weights}, {"strategy": "pmfl"})
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("encoder.w"), weights)
        assert file.metadata() == {"strategy": "pmfl"}
    weights = torch.randn(4, 3)  # contiguous, so that only a copy parts those that share its memory
    recorder.save_model({"a": weights, "tied": weights, "part": weights[0]}, {})
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("tied"), weights)
        assert torch.equal(file.get_tensor("part"), weights[0])


def ink(path):
    """Return the share of pixels that are not white."""
    return float((image.imread(path)[..., :3] < 0.98).any(-1).mean())


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), slow(10, 10), (1000, 200)])
def test_figures_show_something(tmp_path, clients, classes):
    rng = np.random.default_rng(0)
    figures.partition_figure(tmp_path / "p.png", rng.integers(0, 50, (clients, classes)))
    assert ink(tmp_path / "p.png") > 0.2
    shown = np.unique(np.linspace(0, clients - 1, min(clients, 200)).astype(int))
    seen = [(clients // 2, np.flatnonzero(rng.random(len(shown)) < 0.5)) for _ in range(900)]
    figures.participation_figure(tmp_path / "a.png", seen, shown)
    assert ink(tmp_path / "a.png") > 0.1
    curve = [(t, t / 100) for t in range(100)]
    figures.accuracy_figure(tmp_path / "c.png", {("global", "test", "accuracy"): curve})
    figures.accuracy_figure(tmp_path / "e.png", {})
    assert ink(tmp_path / "c.png") > ink(tmp_path / "e.png") + 0.001


def test_a_runs_own_curve_ends_before_the_fine_tuning(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, *_: drawn.extend(figure.axes[0].lines))
    own = [(t, 0.4) for t in range(1, 100)]
    curves = {("personal", "test", "accuracy"): [*own, (100, 0.9)], ("personal", "test", "untuned/accuracy"): [(100, 0.5)]}
    figures.accuracy_figure(tmp_path / "tuned.png", curves)
    last = {line.get_label(): line.get_ydata()[-1] for line in drawn}
    assert last["personal models, own test parts (mean of 20)"] == pytest.approx(40.5)
    assert last["personal models, own test parts, fine-tuned"] == pytest.approx(90)


def test_figures_of_the_smallest_runs(tmp_path):
    shown = np.arange(3)
    figures.participation_figure(tmp_path / "full.png", [(3, shown)], shown)
    figures.participation_figure(tmp_path / "none.png", [(0, shown[:0])], shown)
    assert ink(tmp_path / "full.png") > 0.3
    figures.accuracy_figure(tmp_path / "point.png", {("global", "test", "accuracy"): [(1, 0.5)]})
    figures.accuracy_figure(tmp_path / "blank.png", {("global", "test", "accuracy"): [(1, float("nan"))]})
    assert not np.array_equal(image.imread(tmp_path / "point.png"), image.imread(tmp_path / "blank.png"))
    figures.partition_figure(tmp_path / "empty.png", np.zeros((4, 3), dtype=int))
    figures.partition_figure(tmp_path / "even.png", np.full((4, 3), 7))
    assert ink(tmp_path / "even.png") > ink(tmp_path / "empty.png") + 0.2


def test_plain_progress_is_a_few_lines(capsys):
    with Progress(1000, "a run") as progress:
        for t in range(1001):
            progress.update(t, 5, t / 1000 if t % 10 == 0 else None, 1.0 if t % 10 == 0 else None)
        progress.note("a note")
    lines = capsys.readouterr().out.splitlines()
    assert 15 <= len(lines) <= 30
    assert lines[0] == "a run: 1000 rounds"
    assert lines[1].startswith("round    0/1000")
    assert lines[-2].startswith("round 1000/1000  accuracy 100.00%  loss 1.0000  participants   5")
    assert lines[-1] == "a note"


def test_plain_progress_shows_the_first_round_and_where_a_run_was_cut(capsys):
    with pytest.raises(KeyboardInterrupt), Progress(50, "a run") as progress:
        for t in range(8):
            progress.update(t, 3, 0.5 if t == 5 else None, None)
        raise KeyboardInterrupt
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  accuracy")[0] for line in lines[1:]] == ["round  0/50", "round  5/50", "round  7/50"]


def test_plain_progress_speaks_between_rare_evaluations(capsys):
    with Progress(1000, "a run") as progress:
        for t in range(1001):
            progress.update(t, 3, 0.25 if t % 500 == 0 else None, None)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split()[1].split("/")[0]) for line in lines] == list(range(0, 1001, 100))
    # An accuracy stands in the line of the round that was evaluated alone.
    assert [line.split()[3] for line in lines] == ["25.00%", *"----", "25.00%", *"----", "25.00%"]


def test_slow_rounds_have_a_rate(capsys, monkeypatch):
    now = iter(range(0, 100_000, 40))
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("contrafed.runs.output.console.time", clock)
    with Progress(3, "a run") as progress:
        for t in range(4):
            progress.update(t, 3, 0.25, None)
    first, *lines = capsys.readouterr().out.splitlines()[1:]
    assert "rounds/s" not in first
    assert all(0 < float(line.split(" rounds/s")[0].split()[-1]) < 0.03 for line in lines)


def test_client_values_keep_their_kind(tmp_path):
    recorder = record(tmp_path / "run", accuracies=())
    recorder.clients(1, [3, 4], "steps", np.array([5, 6]))
    recorder.clients(1, np.array([3]), "loss", np.array([0.5], dtype=np.float32))
    with pytest.raises(ValueError, match="zip"):
        recorder.clients(1, [3, 4], "loss", [0.5])
    recorder.close()
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines()[1:] == ["1,3,steps,5", "1,4,steps,6", "1,3,loss,0.5"]


def test_flower_stays_quiet_whatever_its_import_does():
    logger, said = logging.getLogger("flwr"), []
    level, listener = logger.level, logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(listener)
    try:
        quiet_libraries(verbose=False)
        logger.setLevel(logging.DEBUG)  # as Flower does when it is imported
        logger.info("chatter")
        logger.error("trouble")
        quiet_libraries(verbose=True)
        logger.info("details")
    finally:
        quiet_libraries(verbose=False)
        logger.removeHandler(listener)
        logger.setLevel(level)
    assert said == ["trouble", "details"]


def test_what_the_user_set_stays(monkeypatch):
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    quiet_libraries(verbose=False)
    assert (os.environ["RAY_DEDUP_LOGS"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("0", "0")


def test_importing_is_light():
    heavy = ["torch", "matplotlib", "pandas", "tensorboard", "rich", "flwr", "ray"]
    code = f"import sys, contrafed.runs.output; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_last_lines_of_a_run(tmp_path, capsys):
    print_summary(record(tmp_path / "run").finish("finished", {"seconds": 6.0}), "some/folder")
    out = capsys.readouterr().out
    assert "accuracy: final 50.00%, best 60.00%, mean of the best five 50.00%" in out
    assert "3 rounds in 6.0 s (2.000 s a round)" in out
    assert "failed clients: 3, rejected replies: 0" in out
    assert out.endswith("everything is in some/folder\n")
