"""Runs that end before their last round, and the callback of a notebook."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import config_of, read_rows
from reported import write_run
from safetensors.torch import load_file
from tiny import TINY_RUN

from contrafed.report.runs import read
from contrafed.runs.early_stopping import Stopping
from contrafed.runs.output import select_shown_scores
from contrafed.runs.run import run
from contrafed.server.base import Round

SIX_ROUNDS = (*TINY_RUN, "num_rounds=6", "participation=full", "engine=local", "strategy=fedavg", "tracker=none")
NO_LEARNING = "strategy.local.lr=1e-12"  # nothing is learned, so that no accuracy rises


def metrics(folder):
    return read_rows(Path(folder) / "metrics.csv")


def accuracies(folder, scope="global"):
    wanted = (scope, "test", "accuracy")
    return {int(r["round"]): float(r["value"]) for r in metrics(folder) if (r["scope"], r["split"], r["metric"]) == wanted}


@pytest.mark.parametrize(
    ("patience", "target", "curve", "stopped", "reached"),
    [
        (None, None, [0.1, 0.1, 0.1], None, None),
        (2, None, [0.1, 0.3, 0.2], None, None),
        (2, None, [0.1, 0.3, 0.2, 0.3], "early_stop", None),  # as good as the best is no better
        (2, None, [0.1, 0.3, 0.2, 0.31], None, None),
        (1, None, [0.2], None, None),
        (None, 0.3, [0.1, 0.29], None, None),
        (None, 0.3, [0.1, 0.3], "target_accuracy", 2),
        (1, 0.3, [0.3, 0.3], "target_accuracy", 1),
        (None, 0.3, [0.1] * 8 + [0.5], None, 9),  # reached by the last round, which would have been the last anyway
    ],
)
def test_when_a_run_ends(patience, target, curve, stopped, reached):
    stopping = Stopping(patience, target)
    assert stopping.ends([(t, value) for t, value in enumerate(curve, 1)], last_round=9) == (stopped is not None)
    assert (stopping.stopped, stopping.reached) == (stopped, reached)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run of six rounds, and the accuracy that its third round first reaches."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(config_of(*SIX_ROUNDS, f"output_dir={folder}"))
    found = accuracies(folder)
    target = found[3]
    assert max(found[1], found[2]) < target
    return folder, target


def test_a_run_ends_at_its_target_with_rounds_and_bytes_to_it(whole, tmp_path):
    folder, target = whole
    summary = run(config_of(*SIX_ROUNDS, f"target_accuracy={target}", f"output_dir={tmp_path}/run"))
    assert (summary["status"], summary["stopped_by"], summary["rounds"]) == ("finished", "target_accuracy", 3)
    assert (summary["rounds_to_target"], summary["target_accuracy"]) == (3, target)
    assert summary["bytes_up_to_target"] == summary["bytes_up"] == 3 * 6 * 4 * summary["parameters"]
    assert summary["bytes_down_to_target"] == summary["bytes_down"]
    kept = [row for row in metrics(folder) if int(row["round"]) <= 3]
    assert metrics(tmp_path / "run") == kept


def test_a_target_beyond_reach_is_said_to_be(tmp_path):
    summary = run(config_of(*SIX_ROUNDS, "num_rounds=1", "target_accuracy=1.0", f"output_dir={tmp_path}/run"))
    assert (summary["rounds_to_target"], summary["bytes_up_to_target"], summary["rounds"]) == (None, None, 1)
    assert "stopped_by" not in summary


def test_a_run_that_is_evaluated_by_clients_never_ends_by_the_servers_score():
    """Without a client's reply the round has no score."""
    done = Round(4, np.arange(2), evaluation={"test/accuracy": 0.9}, evaluating=True)
    assert select_shown_scores(done, True) == ("personal", {})
    assert select_shown_scores(done, False) == ("global", {"accuracy": 0.9})
    done.client_evaluation = {"accuracy": 0.5}
    assert select_shown_scores(done, True) == ("personal", {"accuracy": 0.5})
    assert (
        select_shown_scores(Round(4, np.arange(2), evaluation={"test/accuracy": 0.9}), True)[0] == "global"
    )  # no client has a test part


def test_a_finished_run_is_looked_at_again_for_a_target(whole, tmp_path):
    _, target = whole
    finished = (*SIX_ROUNDS, "checkpoint_every=3", f"output_dir={tmp_path}/run")
    run(config_of(*finished))
    summary = run(config_of(*finished, "resume=latest", f"target_accuracy={target}"))
    assert (summary["rounds"], summary["rounds_to_target"]) == (6, 3)
    assert summary["bytes_up_to_target"] == 3 * 6 * 4 * summary["parameters"]
    assert "stopped_by" not in summary


def test_a_run_without_progress_ends_by_patience_also_resumed(tmp_path, capsys):
    patient = (*SIX_ROUNDS, NO_LEARNING, "early_stop=3", "checkpoint_every=1")
    summary = run(config_of(*patient, f"output_dir={tmp_path}/whole"))
    assert (summary["stopped_by"], summary["rounds"]) == ("early_stop", 4)
    assert "ended after round 4: the accuracy has not risen for early_stop=3 evaluations" in capsys.readouterr().out

    def cut(server_round, values):
        if server_round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config_of(*patient, f"output_dir={tmp_path}/cut"), on_round=cut)
    assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "interrupted"
    resumed = run(config_of(*patient, "resume=latest", f"output_dir={tmp_path}/cut"))
    assert (resumed["stopped_by"], resumed["rounds"]) == ("early_stop", 4)
    assert (tmp_path / "cut" / "metrics.csv").read_bytes() == (tmp_path / "whole" / "metrics.csv").read_bytes()
    # With more patience the same run continues.
    onward = run(
        config_of(*SIX_ROUNDS, NO_LEARNING, "early_stop=5", "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/cut")
    )
    assert (onward["rounds"], "stopped_by" in onward) == (6, False)


def test_the_last_round_of_a_run_that_ended_early_is_evaluated_as_the_last(tmp_path):
    """FedAvg+FT tunes before the last evaluation, and every client saves its model."""
    tuned = [*SIX_ROUNDS, "strategy=fedavg_ft", NO_LEARNING, "early_stop=2", "save_personal=true", f"output_dir={tmp_path}/run"]
    tuned.remove("strategy=fedavg")
    summary = run(config_of(*tuned))
    assert (summary["stopped_by"], summary["rounds"]) == ("early_stop", 3)
    assert {int(row["round"]) for row in metrics(tmp_path / "run") if row["metric"] == "untuned/accuracy"} == {3}
    found = accuracies(tmp_path / "run", "personal")
    assert found[3] > found[2] == found[1]
    assert summary["personal_accuracy_mean"] == found[3]
    assert len(list((tmp_path / "run" / "personal").glob("*.safetensors"))) == 6


def test_a_callback_gets_every_round_and_may_end_the_run(whole, tmp_path):
    folder, _ = whole
    seen = {}
    run(config_of(*SIX_ROUNDS, f"output_dir={tmp_path}/run"), on_round=seen.__setitem__)
    assert sorted(seen) == list(range(7))
    assert {t: values["global/test/accuracy"] for t, values in seen.items()} == accuracies(folder)
    assert "global/system/bytes_up" in seen[1]
    rows = metrics(folder)
    assert sum(len(values) for values in seen.values()) == len(rows)

    def failing(server_round, values):
        if server_round == 2:
            raise ValueError("the notebook's own")

    with pytest.raises(ValueError, match="the notebook's own"):
        run(config_of(*SIX_ROUNDS, f"output_dir={tmp_path}/failed"), on_round=failing)
    assert json.loads((tmp_path / "failed" / "summary.json").read_text())["status"] == "failed"
    assert max(int(row["round"]) for row in metrics(tmp_path / "failed")) == 2
    assert load_file(tmp_path / "failed" / "model.safetensors")


def test_a_run_that_was_evaluated_before_its_first_round_alone(tmp_path):
    """For example a method with a second model until its first evaluation."""
    first = [(0, "personal", "test", "trained/accuracy", 0.1)]
    found = read(write_run(tmp_path / "a", (0.1,), scope=("personal", "test"), more=first, summary=False), "a")
    assert not [key for key in found.summary if key.startswith("personal_")]
    later = [*first, (10, "personal", "test", "trained/accuracy", 0.6)]
    found = read(write_run(tmp_path / "b", (0.1, 0.5), scope=("personal", "test"), more=later, summary=False), "b")
    assert found.number("personal_trained_accuracy_mean") == 0.6


def test_a_job_does_not_go_on_from_a_finished_job_that_ended_elsewhere(tmp_path, call_command):
    sweep = ("-m", *SIX_ROUNDS, NO_LEARNING, "checkpoint_every=1", "resume=latest", f"output_dir={tmp_path}/sweep")
    assert call_command(*sweep, "early_stop=1,2").returncode == 0
    before = [(tmp_path / f"sweep/{k}/metrics.csv").read_bytes() for k in range(2)]
    again = call_command(*sweep, "early_stop=4,1,2")
    assert again.returncode != 0
    assert "early_stop=4 (there: 1)" in again.stderr
    assert [(tmp_path / f"sweep/{k}/metrics.csv").read_bytes() for k in range(2)] == before


def test_a_resumed_run_selects_on_the_same_data(tmp_path, expect_error):
    """Its best round so far was selected on these."""
    how = (*SIX_ROUNDS, "partition.validation_fraction=0.2", "checkpoint_every=2", f"output_dir={tmp_path}")
    run(config_of(*how, "select_on=test"))
    with expect_error("resume"):
        run(config_of(*how, "select_on=validation", "resume=latest"))
