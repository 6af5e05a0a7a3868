"""Who shows up: probabilities, the chain's frequencies, cycles, traces, and the server's selection."""

import numpy as np
import pytest
from rig import config_of

from contrafed.errors import UserError
from partitions.participation.base import Heterogeneous, check_settings, make_participation, probabilities
from partitions.participation.markovian import transitions


def settings_of(name, **changes):
    return config_of(f"participation={name}")["participation"] | changes


def classes(num_nodes=200, num_classes=10, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(num_classes, 0.1), num_nodes)


def make(name, num_nodes=200, seed=0, **changes):
    return make_participation(settings_of(name, **changes), lambda: classes(num_nodes), num_nodes, seed)


@pytest.mark.parametrize("name", ["full", "uniform", "bernoulli", "markovian", "cyclic"])
def test_a_round_is_a_function_of_the_seed_whatever_is_asked_before(name):
    forwards, backwards = make(name), make(name)
    rounds = range(1, 30)
    first = [forwards.participants(r) for r in rounds]
    second = [backwards.participants(r) for r in reversed(rounds)][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(np.array_equal(ids, np.unique(ids)) and ids.dtype == np.int64 for ids in first)
    if name != "full":
        other = [make(name, seed=1).participants(r) for r in rounds]
        assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("chain", "stationary"), [("fedau", lambda p: p), ("paper", lambda p: 1 / (2 - p))])
def test_markov_frequency_is_the_stationary_probability(chain, stationary):
    """P12: over 20,000 rounds within three standard deviations, which for a chain are sqrt((1 + r)/(1 - r)) times wider."""
    p = np.array([0.02, 0.04, 0.1, 0.4, 0.9])
    pattern = make_participation(settings_of("markovian", chain=chain, beta=None), lambda: np.eye(5), len(p), seed=3)
    pattern.p = p
    pattern.p01, pattern.p10 = transitions(p, 0.05, chain)
    pattern._restart()
    rounds = 20_000
    seen = sum(pattern.available(r).astype(float) for r in range(1, rounds + 1)) / rounds
    target = stationary(p)
    correlation = 1 - pattern.p01 - pattern.p10
    sigma = np.sqrt(target * (1 - target) / rounds * (1 + correlation) / (1 - correlation))
    assert (np.abs(seen - target) < 3 * sigma).all(), (seen, target, sigma)


def test_markov_transitions_table():
    p01, p10 = transitions(np.array([0.02, 0.04, 0.1, 0.4, 1.0]), 0.05, "fedau")
    assert p01 == pytest.approx([0.020408, 0.041667, 0.05, 0.05, 0.05], abs=1e-6)
    assert p10 == pytest.approx([1, 1, 0.45, 0.075, 0], abs=1e-12)


def test_bernoulli_frequency():
    pattern = make("bernoulli")
    seen = sum(pattern.available(r).astype(float) for r in range(1, 5001)) / 5000
    p = pattern.probabilities
    assert (np.abs(seen - p) < 4.5 * np.sqrt(p * (1 - p) / 5000) + 1e-12).all()


@pytest.mark.parametrize(("p", "active"), [(0.02, 2), (0.07, 7), (0.1, 10), (0.29, 29), (0.291, 30), (0.57, 57), (1.0, 100)])
def test_cyclic_rounds_per_cycle(p, active):
    pattern = make("cyclic", num_nodes=30, beta=None, mean_probability=p)
    here = np.array([pattern.available(r) for r in range(1, 201)])
    assert (here[:100].sum(0) == active).all()
    assert np.array_equal(here[:100], here[100:])
    # One run of active rounds a cycle: it starts at most once.
    assert ((here[1:] & ~here[:-1]).sum(0) <= 2).all()


def test_cyclic_fedau_variant_has_an_active_and_an_idle_round():
    for p, active in ((0.001, 1), (0.026, 3), (1.0, 99)):
        pattern = make("cyclic", num_nodes=5, beta=None, mean_probability=p, floor=0.0, variant="fedau")
        assert (sum(pattern.available(r).astype(int) for r in range(1, 101)) == active).all()


def test_probabilities_are_floored_capped_and_scaled():
    proportions = classes(5000)
    z = None
    for scaling in ("analytic", "empirical", "empirical_floor"):
        config = Heterogeneous(0.1, 0.1, 0.02, scaling)
        p = probabilities(config, lambda: proportions, 5000, 0)
        assert p.min() >= 0.02
        assert p.max() <= 1.0
        z = p if scaling == "analytic" else z
        if scaling == "empirical_floor":
            assert p.mean() == pytest.approx(0.1, abs=1e-6)
    # Before floor and cap, the mean over draws of Z of the analytic scaling is E[p].
    config = Heterogeneous(1.0, 0.1, 0.0, "analytic")
    means = [probabilities(config, lambda: proportions, 5000, seed).mean() for seed in range(300)]
    assert np.mean(means) == pytest.approx(0.1, rel=0.05)
    raised = probabilities(Heterogeneous(0.1, 1.0, 0.0, "analytic"), lambda: proportions, 5000, 0)
    assert raised.max() == 1.0  # 10 <Z, D> exceeds 1 for many nodes


def test_by_hand_probabilities():
    """One class per node and Z from the seed: p_k = Z_c * E[p] * C."""
    from contrafed.randomness import generator

    z = generator(4, "participation probabilities").dirichlet(np.full(3, 0.5))
    p = probabilities(Heterogeneous(0.5, 0.1, 0.0, "analytic"), lambda: np.eye(3), 3, 4)
    assert p == pytest.approx(np.minimum(z * 0.3, 1))


def test_selection_is_uniform_without_replacement_and_blind_to_availability():
    pattern = make("uniform", num_nodes=20, select=5)
    counts = np.zeros(20)
    for r in range(1, 4001):
        ids = pattern.participants(r)
        assert len(ids) == 5
        counts[ids] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    away = make("bernoulli", num_nodes=20, select=5, beta=None, mean_probability=0.5)
    for r in range(1, 50):
        chosen = make("uniform", num_nodes=20, select=5).participants(r)
        assert set(away.participants(r)) == set(chosen) & set(np.flatnonzero(away.available(r)))


def test_a_fraction_selects_at_least_one():
    assert len(make("uniform", num_nodes=200).participants(1)) == 20
    assert len(make("uniform", num_nodes=3, select=0.1).participants(1)) == 1


def test_selecting_from_a_million_nodes_builds_no_array_of_them(monkeypatch):
    pattern = make_participation(settings_of("uniform", select=100), lambda: None, 1_000_000, 0)
    monkeypatch.setattr(np, "arange", None)
    monkeypatch.setattr(type(pattern), "available", None)
    assert len(pattern.participants(1)) == 100


def test_trace(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("node,round,available\n0,1,1\n2,1,1\n1,2,1\n0,3,0\n")
    pattern = make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)
    assert [pattern.participants(r).tolist() for r in (1, 2, 3, 4)] == [[0, 2], [1], [], [0, 2]]
    once = make_participation(settings_of("trace", path=str(file), repeat=False), lambda: None, 3, 0)
    assert once.participants(4).tolist() == []


def test_trace_from_parquet(tmp_path):
    import pandas as pd

    file = tmp_path / "trace.parquet"
    pd.DataFrame({"node": [1], "round": [1], "available": [True]}).to_parquet(file)
    pattern = make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)
    assert pattern.participants(1).tolist() == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node,round\n0,1\n", "no column 'available'"),
        ("node,round,available\n7,1,1\n", r"0\.\.2 .*found 7\.\.7"),
        ("node,round,available\n0,0,1\n", "at least 1, found 0"),
        ("node,round,available\n0,1,2\n", "must be 0 or 1"),
        ("node,round,available\n", "no rows"),
        ("node,round,available\n0,1,\n", "empty cells"),
        ("", "cannot read"),
    ],
)
def test_faulty_traces_are_one_line(tmp_path, text, message):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("trace", {}, "needs participation.path"),
        ("trace", {"path": "/nowhere.csv"}, "no file /nowhere.csv"),
        ("uniform", {"select": 11}, r"1\.\.10"),
        ("uniform", {"select": 0}, "got 0"),
        ("uniform", {"select": 1.5}, "got 1.5"),
        ("bernoulli", {"floor": 1.5}, "participation.floor must be >= 0 and <= 1"),
        ("bernoulli", {"scaling": "x"}, "choices: analytic, empirical, empirical_floor"),
        ("markovian", {"p10": 1}, "unknown participation key 'p10', did you mean 'p01'"),
    ],
)
def test_faulty_settings_are_one_line(name, changes, message):
    with pytest.raises(UserError, match=message) as error:
        check_settings(settings_of(name, **changes), 10)
    assert "\n" not in str(error.value)
