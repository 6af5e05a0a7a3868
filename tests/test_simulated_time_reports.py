"""Reports of runs with a clock: accuracy over simulated seconds, seconds to a target, and who waits for whom."""

import pytest
from reported import write_run

from contrafed.report import figures, results
from contrafed.report.runs import SIMULATED_TIME, find
from contrafed.report.tables import runs_table
from contrafed.report.waiting import align_seeds, draw_waits, waits_of

LENGTHS = {10: 5.0, 20: 15.0, 30: 20.0}  # of the rounds that have a row


def write_timed_run(folder, slower=1, **changes):
    """Write a run whose rounds end after 5, 20 and 40 simulated seconds, ``slower`` times as late."""
    more, clients, now = [], [], 0.0
    for t, length in LENGTHS.items():
        now += slower * length
        more += [(t, "global", "time", "simulated_seconds", slower * length), (*(t, "global", "time"), "simulated_time", now)]
        clients += [(t, 0, "simulated_seconds", slower * 5.0), (t, 1, "simulated_seconds", slower * length)]
    return write_run(folder, more=more, clients=clients, summary={"simulated_time": now, "lost_seconds": 2.5}, **changes)


@pytest.fixture
def runs(tmp_path):
    for seed, slower in enumerate((1, 2)):
        write_timed_run(tmp_path / str(seed), slower, seed=seed)
    return find([tmp_path])


def test_seeds_share_one_axis_of_seconds():
    """The first begins at 1 s and ends at 9 s. A value holds until the next."""
    one, other = [(1.0, 10), (5.0, 30), (9.0, 50)], [(0.5, 1), (4.0, 2), (20.0, 3)]
    assert align_seeds([one, other]) == [
        [(1.0, 10), (4.0, 10), (5.0, 30), (9.0, 50)],
        [(1.0, 1), (4.0, 2), (5.0, 2), (9.0, 2)],
    ]
    assert align_seeds([[], one]) == [one]


def test_a_client_waits_from_its_reply_to_the_end_of_the_round(runs):
    assert waits_of(runs[0]) == {0: (15.0, 25.0), 1: (40.0, 0.0)}


def test_tables_have_the_seconds_to_a_target(runs, tmp_path):
    """0.8 is reached in round 20, after 20 and 40 seconds."""
    table = runs_table(runs, "t", 0.8)
    (row,) = table.numbers.to_dict("records")
    assert row["simulated seconds to 80 % test accuracy"] == 30
    assert (row["simulated seconds"], row["lost seconds of late clients"]) == (60, 2.5)
    write_run(tmp_path / "without" / "run")
    assert not any("simulated" in head for head in runs_table(find([tmp_path / "without"]), "t", 0.8).heads)


def test_figures_of_time_and_of_waiting(runs):
    drawn = figures.of_runs(runs, "t")
    assert {"accuracy_over_time", "waiting"} <= drawn.keys()
    line = drawn["accuracy_over_time"].axes[0].lines[0]
    assert line.get_xdata().tolist() == [10, 20, 40]  # the second run has its first value after 10 seconds
    assert line.get_ydata().tolist() == pytest.approx([50, 65, 75])


def test_waiting_has_one_legend_and_whole_titles():
    label = "moon partition.alpha=0.1 participation=markovian local.lr=0.05 local.epochs=5 model.projection=[256, 256]"
    values = {f"{label} num_clients=9 num_rounds={number}": {0: (15.0, 25.0), 1: (40.0, 0.0)} for number in range(6)}
    figure = draw_waits(values, "t")
    figure.draw_without_rendering()
    assert len(figure.legends) == 1
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert axes._left_title.get_text().endswith("31 % of the time is waiting")
        assert axes._left_title.get_window_extent().x1 <= figure.bbox.x1


def test_results_keep_the_time(runs, tmp_path):
    kept = results.load(results.keep(runs, tmp_path / "results", "r"))
    assert kept[1].points(*SIMULATED_TIME) == [(10, 10.0), (20, 40.0), (30, 80.0)]
    assert waits_of(kept[0]) == {}
    assert kept[0].config["clock"] == {"name": "none"}  # which these runs' configurations do not have
