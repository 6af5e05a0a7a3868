"""The long-run participation rates that patterns report equal the measured ones, also if they change with the rounds."""

import numpy as np
import pytest
from test_participation import make


@pytest.mark.parametrize("select", [None, 0.25])
@pytest.mark.parametrize(
    ("name", "changes"),
    [("full", {}), ("uniform", {}), ("bernoulli", {}), *[("markovian", {"chain": chain, "p01": p01}) for chain in
     ("fedau", "paper") for p01 in (0.05, 0.5)], ("cyclic", {"variant": "pmfl", "period": 20}),
     ("cyclic", {"variant": "fedau", "period": 20})],
)  # fmt: skip
def test_how_often_clients_take_part_is_what_the_pattern_says(name, changes, select):
    """Over 2,000 rounds, each client is within four standard deviations, and complete cycles are exact.

    A chain's correlation from one round to the next is r = 1 - p01 - p10. It makes the variance of its mean (1 + r) / (1 - r)
    times as large. Its start changes the mean by less than 0.005.
    """
    often = {} if name in ("full", "uniform") else {"mean_probability": 0.5}
    share = 0.5 if name == "uniform" else select
    pattern, share = make(name, 100, **changes, **often, select=share), share or 1
    here = np.zeros(100)
    for server_round in range(1, 2001):
        here[pattern.participants(server_round)] += 1
    said = pattern.probability()
    assert said.shape == (100,)
    assert pattern.is_known()
    assert here.mean() / 2000 == pytest.approx(said.mean(), abs=0.02)
    if name in ("full", "cyclic") and select is None:
        assert (here / 2000).tolist() == pytest.approx(said.tolist(), abs=1e-12)
    there, lasts = said / share, 1 - pattern.p01 - pattern.p10 if name == "markovian" else 0
    variance = share**2 * there * (1 - there) * (1 + lasts) / (1 - lasts) + share * (1 - share) * there
    assert (np.abs(here / 2000 - said) <= 4 * np.sqrt(variance.clip(0) / 2000) + 0.005).all()
    assert said.max() <= share


def test_a_trace_has_no_known_probabilities(tmp_path):
    path = tmp_path / "there.csv"
    path.write_text("client,round,available\n0,1,1\n")
    trace = make("trace", 3, path=str(path))
    assert trace.probability() is None
    assert not trace.is_known()


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
