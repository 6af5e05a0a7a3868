"""schedule=buffered: the order of arrivals, staleness weights, and what a checkpoint holds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Scalar, Schedule, config_of, run_strategy, same, scalar_workspace, strategy_settings

from contrafed.core.registry import find
from contrafed.server.schedule.buffered import Buffered, Config
from contrafed.strategies.fedavg import FedAvg


def config(buffer_size, concurrency, **changes):
    defaults = {"staleness": "polynomial", "staleness_a": 0.5, "staleness_b": 4, "mixes": "updates"}
    return Config(buffer_size, concurrency, **defaults | changes)


def buffered(config, times):
    """Return a schedule of clients that take ``times[k]`` seconds in every round."""
    return Buffered(config, lambda clients, server_round: np.array(times, dtype=float)[clients], 0)


def events(schedule, server_round, cohort):
    """Return who starts, who arrives, and the seconds of a round."""
    started = schedule.start(np.array(cohort), server_round).tolist()
    return started, [each.client for each in schedule.arrived], schedule.elapsed


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [("constant", [1, 1, 1, 1]), ("polynomial", [1, 0.5, 1 / 3, 0.25]), ("hinge", [1, 1, 1 / 2, 1 / 3])],
)
def test_staleness_weights(staleness, expected):
    found = config(1, 1, staleness=staleness, staleness_a=1, staleness_b=1)
    assert [found.weight(late) for late in range(4)] == pytest.approx(expected)


def test_events_by_hand():
    # K = 2 of M = 3, clients that take 1, 2, 5 seconds: 0 and 1 arrive first, while 2 trains on.
    schedule = buffered(config(2, 3), [1, 2, 5])
    assert events(schedule, 1, [0, 1, 2]) == ([0, 1, 2], [0, 1], 2)
    assert events(schedule, 2, [0, 1, 2]) == ([0, 1], [0, 1], 2)
    assert events(schedule, 3, [0, 1, 2]) == ([0, 1], [0, 2], 1)  # 2 took 5 seconds
    assert [(each.client, each.arrives) for each in schedule.training] == [(1, 1)]
    # Without clients that could start, what is left arrives, and then nothing.
    assert events(schedule, 4, []) == ([], [1], 1)
    assert events(schedule, 5, []) == ([], [], 0)


def test_a_place_is_taken_over_within_a_round_and_ties_go_by_partition_id():
    schedule = buffered(config(3, 2), [1] * 6)
    started, arrived, seconds = events(schedule, 1, range(6))
    assert len(started) == 4
    assert arrived[:2] == sorted(arrived[:2])
    assert (len(arrived), seconds) == (3, 2)
    (left,) = schedule.training
    assert left.arrives == 0
    assert arrived[2] < left.client
