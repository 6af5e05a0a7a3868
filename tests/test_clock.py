"""Clocks: seconds by hand, draws by client, recorded speeds, and errors."""

import numpy as np
import pytest
from helpers import check_overrides, config_of

from contrafed.core.client_run import choose
from contrafed.data.clock import Clock, make_clock


def make(name, num_clients=3, seed=0, **changes):
    return make_clock(choose("clock", config_of(f"clock={name}")["clock"] | changes), num_clients, seed)


def same_speeds(one, other, clients, server_round):
    pairs = zip(one.speeds(clients, server_round), other.speeds(clients, server_round), strict=True)
    return all((mine == others).all() for mine, others in pairs)


def test_seconds_by_hand():
    """Download 100 / 50 s, 3 steps of 0.5 s, upload 100 / 20 s. Within 9 s there are 2 s for 4 steps."""
    clock = make("lognormal", step_seconds=0.5, step_sigma=0, bandwidth_down=50, bandwidth_up=20, bandwidth_sigma=0)
    clients, steps = np.arange(3), np.array([3, 0, 1])
    assert clock.seconds(clients, 1, steps, 100, 100).tolist() == [8.5, 7, 7.5]
    assert clock.steps_within(9, clients, 1, 100, 100).tolist() == [4, 4, 4]
    assert clock.steps_within(6, clients, 1, 100, 100).tolist() == [0, 0, 0]


def test_a_client_that_would_never_reply_is_named(expect_error):
    clock = make("lognormal", bandwidth_sigma=0, bandwidth_down=1e-310)
    with expect_error("clock"):
        clock.seconds(np.array([2]), 1, np.array([3]), 100, 100)


def test_a_client_has_the_speed_of_its_seed_alone():
    clients = np.array([2, 0])
    few, many, other = make("lognormal"), make("lognormal", 100), make("lognormal", seed=1)
    assert same_speeds(few, many, clients, 1)
    assert same_speeds(few, few, clients, 7)
    assert not same_speeds(few, other, clients, 1)
    varied = make("lognormal", round_sigma=0.5)
    slower = varied.speeds(clients, 2).step / few.speeds(clients, 2).step
    assert varied.speeds(clients, 2).up * slower == pytest.approx(few.speeds(clients, 2).up)
    assert (varied.speeds(clients, 3).step != varied.speeds(clients, 2).step).all()
    assert same_speeds(varied, make("lognormal", 100, round_sigma=0.5), clients, 2)


def test_a_million_clients_have_the_distribution_asked_for():
    clock, everyone = make("lognormal", 10**6, step_sigma=1.0, round_sigma=0.5), np.arange(10**6)
    logs = np.log(clock.speeds(everyone, 5).step / 0.1)
    assert logs.mean() == pytest.approx(0, abs=0.01)
    assert logs.std() == pytest.approx(1.25**0.5, abs=0.01)
    few = np.array([3, 999_999])
    assert np.log(clock.speeds(few, 5).step / 0.1).tolist() == logs[few].tolist()


def test_a_trace_by_round(tmp_path):
    path = tmp_path / "speeds.csv"
    path.write_text("client,round,step_seconds,bandwidth_down,bandwidth_up\n1,1,2,20,200\n0,3,5,50,500\n0,1,1,10,100\n")
    trace = make("trace", 2, path=str(path))
    assert [trace.speeds(np.array([1, 0]), t).step.tolist() for t in (1, 2, 3, 9)] == [[2, 1], [2, 1], [2, 5], [2, 5]]
    assert trace.speeds(np.array([0]), 3)[1:] == (np.array([50.0]), np.array([500.0]))


@pytest.mark.parametrize(
    "rows", [None, "0,1,1,1,1\n0,1,1,1,1\n", "0,1,1,1,1\n", "0,1,0,1,1\n1,1,1,1,1\n", "5,1,1,1,1\n", "0,0,1,1,1\n"]
)
def test_wrong_traces_are_refused(tmp_path, rows, expect_error):
    path = tmp_path / "speeds.csv"
    if rows is not None:
        path.write_text(f"client,round,step_seconds,bandwidth_down,bandwidth_up\n{rows}")
    with expect_error("clock.path"):
        make("trace", 2, path=str(path))


def test_a_clock_of_the_users_is_tried(monkeypatch, expect_error):
    import contrafed.partitions.clocks.lognormal as module

    monkeypatch.setattr(module.Lognormal, "speeds", lambda self, clients, server_round: (np.ones(len(clients)), np.zeros(9)))
    with expect_error("clock"):
        check_overrides("clock=lognormal")
    monkeypatch.setattr(module.Lognormal, "speeds", Clock.speeds)
    with expect_error("clock"):
        check_overrides("clock=lognormal")
