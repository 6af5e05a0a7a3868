"""Availability that changes with the rounds: sine, separated and round_robin, by hand and over many rounds."""

import numpy as np
import pytest
from test_participation_rates import make

SAME = {"beta": None, "mean_probability": 0.5, "floor": 0.0}


def run(name, num_clients, rounds, **changes):
    """Return the availability (rounds, K) and the pattern."""
    pattern = make(name, num_clients, **changes)
    return np.array([pattern.available(t) for t in range(1, rounds + 1)]), pattern


@pytest.mark.parametrize("zones", [1, 4])
def test_the_sine_by_its_quarters(zones):
    """gamma = 1/2: p_k is 1/2 of E[p] at t = 0, E[p] after a quarter, 0 after three quarters. Zones shift the rounds."""
    here, pattern = run("sine", 20_000, 4, **SAME, period=4, amplitude=0.5, zones=zones)
    wave = np.array([0.5, 1.0, 0.5, 0.0])
    for zone in range(zones):
        assert here[:, pattern.zones == zone].mean(1) == pytest.approx(0.5 * np.roll(wave, -zone), abs=0.03)
    assert pattern.presence() == pytest.approx(0.25)
    assert here.mean() == pytest.approx(0.25, abs=0.01)


def test_separated_clients_wait_and_have_the_rate_of_the_theory():
    here, pattern = run("separated", 400, 1000, **SAME, separation=3)
    for client in here.T:
        assert np.diff(np.flatnonzero(client)).min() > 3
    assert pattern.presence() == pytest.approx(1 / (3 + 2))
    assert here.mean() == pytest.approx(0.2, abs=0.005)
    assert (pattern.available(7) == here[6]).all()  # an earlier round replays
    plain, _ = run("separated", 50, 20, **SAME, separation=0)
    assert (plain == run("bernoulli", 50, 20, **SAME)[0]).all()


@pytest.mark.parametrize(("active", "step"), [(4, 4), (4, 2), (3, 2), (10, 5), (2, 4)])
def test_round_robin_windows_overlap_and_have_the_rate_of_the_theory(active, step):
    cycle = 10
    here, pattern = run("round_robin", 10, cycle + 1, active=active, step=step)
    assert (here.sum(1) == active).all()
    assert ((here[:-1] & here[1:]).sum(1) >= max(active - step, 0)).all()
    assert here[:cycle].mean(0) == pytest.approx(pattern.presence())


@pytest.mark.parametrize("overrides", [{"active": 11}, {"step": 11}])
def test_a_window_larger_than_the_federation_is_refused(overrides, expect_error):
    with expect_error(f"participation.{next(iter(overrides))}"):
        make("round_robin", 10, **overrides)
