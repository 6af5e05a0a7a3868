"""The seconds of a round's phases in a run's summary."""

from contrafed.runs.output import RunRecorder


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
    path.write_text("".join(line.rpartition(",")[0] + "\n" for line in path.read_text().splitlines()))
    again = RunRecorder(tmp_path / "short", "", logs=sizes | {"times": path.stat().st_size})
    again.time(9, 3.0, 1.0)
    assert again.finish("finished", {})["aggregate_seconds_median"] is None
    again.close()
