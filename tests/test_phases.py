"""The seconds of a round's phases in a run's summary, and the largest weight of each round."""

import numpy as np
import pytest
from helpers import config_of, read_rows
from tiny import TINY_RUN, tiny_workspace

from contrafed.runs.output import RunRecorder
from contrafed.runs.run import run


def test_seconds_of_phases_are_medians_of_rounds_that_only_train(tmp_path):
    """Rounds 4, 5 and 7 are used. The first three warm up, and the sixth has an evaluation, of any scope and split."""
    recorder = RunRecorder(tmp_path, "")
    for t, seconds, rule in ((1, 90, 50), (2, 90, 50), (3, 90, 50), (4, 5, 1), (5, 7, 2), (6, 60, 40), (7, 9, 5), (8, 70, 30)):
        recorder.time(t, seconds, rule)
    recorder.metric(6, "global", "test", "accuracy", 0.5)
    recorder.metric(8, "personal", "test", "accuracy", 0.5)
    summary = recorder.finish("finished", {})
    assert (summary["local_seconds_median"], summary["aggregate_seconds_median"]) == (4, 2)
    recorder.close()


def test_a_run_without_times_of_phases_has_no_medians(tmp_path):
    """All rounds warm up, or an earlier version started the run."""
    (tmp_path / "short").mkdir()
    recorder = RunRecorder(tmp_path / "short", "")
    recorder.time(1, 3.0, 1.0)
    assert recorder.finish("finished", {})["local_seconds_median"] is None
    sizes = recorder.sizes()
    recorder.close()
    path = tmp_path / "short" / "times.csv"
    path.write_text("".join(line.rsplit(",", 2)[0] + "\n" for line in path.read_text().splitlines()))
    again = RunRecorder(tmp_path / "short", "", logs=sizes | {"times": path.stat().st_size})
    again.time(9, 3.0, 1.0)
    assert again.finish("finished", {})["aggregate_seconds_median"] is None
    again.close()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (("strategy=fedavg",), "samples"),
        (("strategy=fedavg", "strategy.weights=uniform"), "uniform"),
        (("strategy=pmfl", "strategy.weights=samples"), "samples"),
        (("strategy=fedavg", "privacy=central"), "samples"),
        (("strategy=fedproto",), None),
    ],
)
def test_the_largest_weight_of_a_round_is_written(tmp_path, how, expected):
    """By examples, by clients, and nothing for a method that sums no models."""
    run(config_of(*TINY_RUN, "participation=full", "num_rounds=2", "engine=local", *how, f"output_dir={tmp_path}/run"))
    found = [row["largest_weight"] for row in read_rows(tmp_path / "run" / "times.csv")]
    sizes = tiny_workspace("strategy=fedavg")[1].federation.partition.sizes
    weights = {"samples": sizes, "uniform": np.ones(len(sizes))}
    wanted = "" if expected is None else f"{weights[expected].max() / weights[expected].sum():.6f}"
    assert found == [wanted] * 2
