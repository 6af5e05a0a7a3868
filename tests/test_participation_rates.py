"""The long-run participation rates that patterns report equal the measured ones."""

import numpy as np
import pytest
from helpers import config_of

from contrafed.core.client_run import choose
from contrafed.data.participation import make_participation


def make(name, num_clients, **changes):
    """Return a pattern over clients of very unequal classes."""
    classes = np.random.default_rng(0).dirichlet(np.full(10, 0.1), num_clients)
    chosen = choose("participation", config_of(f"participation={name}")["participation"] | changes)
    return make_participation(chosen, lambda: classes, num_clients, 0)


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
