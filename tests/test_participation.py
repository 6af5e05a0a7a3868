"""Availability: probabilities, the chain's frequencies, cycles, traces, and the server's selection."""

import functools
import tracemalloc

import numpy as np
import pytest
from helpers import config_of

from contrafed.core.client_run import choose
from contrafed.core.randomness import generator
from contrafed.data.participation import Heterogeneous, make_participation, probabilities
from contrafed.partitions.participation import markovian
from contrafed.partitions.participation.markovian import transitions
from contrafed.runs.run import run


@functools.cache
def compose_participation(name):
    return config_of(f"participation={name}")["participation"]


def settings_of(name, **changes):
    return choose("participation", compose_participation(name) | changes)


def heterogeneous(beta, mean_probability, floor, scaling):
    always = {"select": None, "loss_rate": 0.0, "deadline": None, "over_select": None, "late": "drop", "staleness_a": 0.0}
    return Heterogeneous(**always, beta=beta, mean_probability=mean_probability, floor=floor, scaling=scaling)


def classes(num_clients=200, num_classes=10, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(num_classes, 0.1), num_clients)


def make(name, num_clients=200, seed=0, **changes):
    return make_participation(settings_of(name, **changes), lambda: classes(num_clients), num_clients, seed)


@pytest.mark.parametrize("name", ["full", "uniform", "bernoulli", "markovian", "cyclic", "arrival"])
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


@pytest.mark.parametrize("chain", ["fedau", "paper"])
def test_markov_moves_with_its_probabilities_and_once_before_the_first_round(chain):
    """With p_k = 0.4 and p01 = 0.3: counts of 100,000 clients, within five standard deviations."""
    p, p01, clients = 0.4, 0.3, 100_000
    pattern = make("markovian", num_clients=clients, beta=None, mean_probability=p, p01=p01, chain=chain)
    p10 = {"fedau": 0.45, "paper": 0.18}[chain]
    first, second = pattern.available(1), pattern.available(2)
    # For the paper's chain neither p (0.4, not moved) nor 1/(2 - p) (0.625, in balance).
    assert first.mean() == pytest.approx(p * (1 - p10) + (1 - p) * p01, abs=5 * 0.5 / clients**0.5)
    assert second[~first].mean() == pytest.approx(p01, abs=5 * 0.5 / (~first).sum() ** 0.5)
    assert (~second[first]).mean() == pytest.approx(p10, abs=5 * 0.5 / first.sum() ** 0.5)


def test_markov_moves_one_round_at_a_time(monkeypatch):
    """The next round needs one draw, and only an earlier round replays."""
    pattern = make("markovian")
    drawn = []
    monkeypatch.setattr(markovian, "generator", lambda *key: drawn.append(key) or generator(*key))
    for r in (1, 2, 3, 3):
        pattern.available(r)
    assert drawn == [(0, "availability", 0), (0, "availability", 1), (0, "availability", 2)]


def test_an_answer_is_not_the_state_of_the_chain():
    pattern, untouched = make("markovian"), make("markovian")
    pattern.available(1)[:] = True
    assert np.array_equal(pattern.available(2), untouched.available(2))


def test_markov_transitions_table():
    p01, p10 = transitions(np.array([0.02, 0.04, 0.1, 0.4, 1.0]), 0.05, "fedau")
    assert p01 == pytest.approx([0.020408, 0.041667, 0.05, 0.05, 0.05], abs=1e-6)
    assert p10 == pytest.approx([1, 1, 0.45, 0.075, 0], abs=1e-12)


@pytest.mark.parametrize(("p", "active"), [(0.02, 2), (0.07, 7), (0.1, 10), (0.29, 29), (0.291, 30), (0.57, 57), (1.0, 100)])
def test_cyclic_rounds_per_cycle(p, active):
    pattern = make("cyclic", num_clients=30, beta=None, mean_probability=p)
    here = np.array([pattern.available(r) for r in range(1, 201)])
    assert (here[:100].sum(0) == active).all()
    assert np.array_equal(here[:100], here[100:])
    # One run of active rounds a cycle: it starts at most once.
    assert ((here[1:] & ~here[:-1]).sum(0) <= 2).all()


def test_cyclic_rounds_are_the_ceiling_for_every_hundredth():
    for hundredths in range(1, 101):
        pattern = make("cyclic", num_clients=1, beta=None, mean_probability=hundredths / 100)
        assert pattern.active.tolist() == [hundredths]
    assert make("cyclic", num_clients=1, beta=None, mean_probability=1e-13).active.tolist() == [1]


def test_cyclic_offsets_are_uniform():
    pattern = make("cyclic", num_clients=100_000, beta=None, mean_probability=0.01)
    starts = np.array([pattern.available(r).sum() for r in range(1, 101)])  # one active round each: the offset itself
    assert starts.sum() == 100_000
    assert np.abs(starts - 1000).max() < 5 * 1000**0.5


def test_cyclic_by_hand():
    """Period 5, p = 0.4, offset 3: active at t = 3, 4, 8, 9, ...; offset 4: at t = 0, 4, 5, 9."""
    for offset, active in ((3, [3, 4, 8, 9]), (4, [0, 4, 5, 9])):
        pattern = make("cyclic", num_clients=1, beta=None, mean_probability=0.4, period=5)
        pattern.offsets = np.array([offset])
        assert [t for t in range(10) if pattern.available(t + 1)[0]] == active


def test_fedaus_cycles_begin_so_that_each_first_window_is_whole():
    """Period 5 and p = 0.4: a client waits 0, 1 or 2 rounds, equally often."""
    # Then it has two active and three inactive rounds in turn.
    pattern = make("cyclic", num_clients=3000, beta=None, mean_probability=0.4, period=5, variant="fedau")
    here = np.array([pattern.available(r) for r in range(1, 13)]).T
    windows, counts = np.unique(here, axis=0, return_counts=True)
    cycles = ["001100011000", "011000110001", "110001100011"]
    assert ["".join(map(str, window.astype(int))) for window in windows] == cycles
    assert counts == pytest.approx([1000] * 3, abs=5 * 1000**0.5)
    cut = make("cyclic", num_clients=3000, beta=None, mean_probability=0.4, period=5)
    assert len(np.unique([cut.available(r) for r in range(1, 13)], axis=1).T) == 5  # PMFL's may begin within a window


def test_cyclic_fedau_variant_has_an_active_and_an_idle_round():
    for p, active in ((0.001, 1), (0.026, 3), (1.0, 99)):
        pattern = make("cyclic", num_clients=5, beta=None, mean_probability=p, floor=0.0, variant="fedau")
        assert (sum(pattern.available(r).astype(int) for r in range(1, 101)) == active).all()


def test_probabilities_are_floored_capped_and_scaled():
    proportions = classes(5000)
    z = None
    for scaling in ("analytic", "empirical", "empirical_floor"):
        config = heterogeneous(0.1, 0.1, 0.02, scaling)
        p = probabilities(config, lambda: proportions, 5000, 0)
        assert p.min() >= 0.02
        assert p.max() <= 1.0
        z = p if scaling == "analytic" else z
        if scaling == "empirical_floor":
            assert p.mean() == pytest.approx(0.1, abs=1e-6)
    # Before floor and cap, the mean over draws of Z of the analytic scaling is E[p].
    config = heterogeneous(1.0, 0.1, 0.0, "analytic")
    means = [probabilities(config, lambda: proportions, 5000, seed).mean() for seed in range(300)]
    assert np.mean(means) == pytest.approx(0.1, rel=0.05)
    raised = probabilities(heterogeneous(0.1, 1.0, 0.0, "analytic"), lambda: proportions, 5000, 0)
    assert raised.max() == 1.0  # 10 <Z, D> exceeds 1 for many clients


def test_empirical_means_by_hand():
    """One class per client: <Z, D_k> = Z_k, so r = mean(Z)/E[p] = 1/(3 E[p]) and p_k = 3 E[p] Z_k, here below 1."""
    z = generator(4, "participation probabilities").dirichlet(np.full(3, 0.5))
    p = probabilities(heterogeneous(0.5, 0.1, 0.0, "empirical"), lambda: np.eye(3), 3, 4)
    assert p == pytest.approx(0.3 * z)
    assert p.mean() == pytest.approx(0.1)
    # Without a client of the second class this run's mean is still E[p], but the analytic one is not.
    some = np.eye(3)[[0, 2]]
    assert probabilities(heterogeneous(0.5, 0.1, 0.0, "empirical"), lambda: some, 2, 4).mean() == pytest.approx(0.1)
    assert probabilities(heterogeneous(0.5, 0.1, 0.0, "analytic"), lambda: some, 2, 4).mean() != pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mean", [0.03, 0.5, 0.9, 1.0])
def test_floored_mean_is_reached_however_unequal_the_clients(mean, seed):
    """At beta = 0.05 the shares of single-class clients span more than twelve powers of ten, and none is 0."""
    p = probabilities(heterogeneous(0.05, mean, 0.02, "empirical_floor"), lambda: np.eye(20), 20, seed)
    assert p.mean() == pytest.approx(mean, rel=1e-9)
    assert p.min() >= 0.02
    assert p.max() <= 1


def test_empty_clients_have_the_floor():
    proportions = np.vstack([np.eye(4), np.zeros((2, 4))])
    for scaling in ("analytic", "empirical", "empirical_floor"):
        p = probabilities(heterogeneous(0.5, 0.1, 0.02, scaling), lambda: proportions, 6, 0)
        assert p[4:].tolist() == [0.02, 0.02]


@pytest.mark.parametrize(
    ("scaling", "mean", "rows"), [("empirical", 0.1, np.zeros((3, 4))), ("empirical_floor", 0.9, np.eye(4)[[0, 1]])]
)
def test_a_mean_out_of_reach_is_one_line(scaling, mean, rows, expect_error):
    rows = np.vstack([rows, np.zeros((2, 4))])
    with expect_error("participation.scaling"):
        probabilities(heterogeneous(0.5, mean, 0.02, scaling), lambda: rows, len(rows), 0)


def test_equal_probabilities_and_the_realised_mean():
    def never():
        raise AssertionError("needs no class proportions")

    equal = make_participation(settings_of("bernoulli", beta=None, mean_probability=0.01), never, 7, 0)
    assert equal.probabilities.tolist() == [0.01] * 7  # the floor is for unequal ones
    assert equal.realised_mean == pytest.approx(0.01)
    assert make("markovian").realised_mean == make("markovian").probabilities.mean()
    full = make_participation(settings_of("full"), never, 7, 0)
    assert full.probabilities is None
    assert full.realised_mean is None


def test_patterns_of_one_seed_share_their_probabilities():
    first, *rest = (make(name).probabilities for name in ("bernoulli", "markovian", "cyclic"))
    assert all(np.array_equal(first, other) for other in rest)
    assert not np.array_equal(first, make("bernoulli", seed=1).probabilities)


def test_by_hand_probabilities():
    """One class per client and Z from the seed: p_k = Z_c * E[p] * C."""
    z = generator(4, "participation probabilities").dirichlet(np.full(3, 0.5))
    p = probabilities(heterogeneous(0.5, 0.1, 0.0, "analytic"), lambda: np.eye(3), 3, 4)
    assert p == pytest.approx(np.minimum(z * 0.3, 1))


def test_selection_is_uniform_without_replacement_and_blind_to_availability():
    pattern = make("uniform", num_clients=20, select=5)
    counts = np.zeros(20)
    for r in range(1, 4001):
        ids = pattern.participants(r)
        assert len(ids) == 5
        counts[ids] += 1
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(4000 * 0.25 * 0.75)
    away = make("bernoulli", num_clients=20, select=5, beta=None, mean_probability=0.5)
    for r in range(1, 50):
        chosen = make("uniform", num_clients=20, select=5).participants(r)
        assert set(away.participants(r)) == set(chosen) & set(np.flatnonzero(away.available(r)))


def test_a_fraction_selects_at_least_one():
    assert len(make("uniform", num_clients=200).participants(1)) == 20
    assert len(make("uniform", num_clients=3, select=0.1).participants(1)) == 1


@pytest.mark.parametrize("name", ["full", "uniform"])
def test_selecting_from_a_million_clients_builds_no_array_of_them(monkeypatch, name):
    pattern = make_participation(settings_of(name, select=100), lambda: None, 1_000_000, 0)
    monkeypatch.setattr(type(pattern), "available", None)
    tracemalloc.start()
    try:
        ids = pattern.participants(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(np.unique(ids)) == 100
    assert peak < 200_000  # in bytes, while a mask of the clients alone has 1,000,000


def test_the_server_selects_among_clients_with_data():
    sizes = np.arange(40) % 2 * 7
    pattern = make("uniform", num_clients=40, select=10)
    pattern.select_among(sizes)
    for server_round in range(1, 9):
        chosen = pattern.participants(server_round)
        assert len(chosen) == 10
        assert (sizes[chosen] > 0).all()
    assert pattern.probability()[sizes > 0] == pytest.approx(0.5)
    everyone = make("uniform", num_clients=40, select=30)
    everyone.select_among(sizes)
    assert everyone.participants(1).tolist() == np.flatnonzero(sizes).tolist()
    same = make("uniform", num_clients=40, select=10)
    same.select_among(np.ones(40))
    assert same.participants(3).tolist() == make("uniform", num_clients=40, select=10).participants(3).tolist()


def test_clients_that_are_never_available_are_counted(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    file.write_text("client,round,available\n0,1,1\n2,1,1\n1,2,0\n")
    shape = ("engine=local", "num_clients=4", "num_rounds=1", "model=mlp", "strategy=fedavg", f"output_dir={tmp_path}/run")
    run(config_of(*shape, "participation=trace", f"participation.path={file}"))
    assert "2 of 4 clients are never available" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("full", {}),
        ("uniform", {}),
        ("round_robin", {"active": 2, "step": 5}),
        ("cyclic", {"variant": "fedau", "floor": 0.0}),
        ("markovian", {"chain": "paper", "floor": 0.0}),
        ("bernoulli", {"floor": 0.0}),
    ],
)
def test_their_number_is_that_of_many_rounds(name, changes):
    pattern = make(name, num_clients=20, **changes)
    seen = set().union(*(pattern.participants(server_round).tolist() for server_round in range(1, 400)))
    assert pattern.num_never_available <= 20 - len(seen)
    if name == "round_robin":
        assert pattern.num_never_available == 20 - len(seen) == 12


def test_trace(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("client,round,available\n0,1,1\n2,1,1\n1,2,1\n0,3,0\n")
    pattern = make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)
    assert [pattern.participants(r).tolist() for r in (1, 2, 3, 4)] == [[0, 2], [1], [], [0, 2]]
    once = make_participation(settings_of("trace", path=str(file), repeat=False), lambda: None, 3, 0)
    assert once.participants(4).tolist() == []


def test_trace_from_parquet(tmp_path):
    import pandas as pd

    file = tmp_path / "trace.parquet"
    for frame in (
        pd.DataFrame({"client": [1, 2], "round": [1, 1], "available": [True, False]}),
        pd.DataFrame({"client": [1, 2], "round": [1, 1], "available": [1, 0]}).astype("Int64"),
    ):
        frame.to_parquet(file)
        pattern = make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)
        assert pattern.participants(1).tolist() == [1]


def test_trace_with_selection_and_unsorted_rows(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("round,available,client\n2,1,3\n1,1,4\n2,1,0\n1,1,1\n")
    pattern = make_participation(settings_of("trace", path=str(file), select=3), lambda: None, 5, 0)
    server = make("uniform", num_clients=5, select=3)
    for r, here in ((1, {1, 4}), (2, {0, 3}), (3, {1, 4})):
        assert set(pattern.participants(r)) == here & set(server.participants(r))


def test_faulty_parquet_is_one_line(tmp_path, expect_error):
    file = tmp_path / "trace.parquet"
    file.write_text("this is not\nparquet")
    with expect_error("participation.path"):
        make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)


@pytest.mark.parametrize(
    "text",
    [
        "client,round\n0,1\n",
        "client,round,available\n7,1,1\n",
        "client,round,available\n0,0,1\n",
        "client,round,available\n0,1,2\n",
        "client,round,available\n",
        "client,round,available\n0,0,1,1\n1,1,2,1\n",
        "client,round,available\n0,1,1\n0,2,\n",
        "client,round,available\n0,1,yes\n",
        "client,round,available\na,1,1\n",
        "client,round,available\n0,1.5,1\n",
        "client,round,available\n-1,1,1\n",
        "client,round,available\n0,1,1\n1,1,1\n0,1,0\n",
        "",
    ],
)
def test_faulty_traces_are_one_line(tmp_path, text, expect_error):
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with expect_error():
        make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_dates_and_spans_of_time_are_no_rounds(tmp_path, zone, expect_error):
    import pandas as pd

    dates = pd.date_range("2026-01-01", periods=3, tz=zone)
    file = tmp_path / "trace.parquet"
    for rounds in (dates, dates - dates[0]):
        pd.DataFrame({"client": [0, 1, 2], "round": rounds, "available": 1}).to_parquet(file)
        with expect_error():
            make_participation(settings_of("trace", path=str(file)), lambda: None, 3, 0)


@pytest.mark.parametrize("name", ["full", "uniform", "bernoulli", "markovian", "cyclic", "arrival"])
def test_no_default_is_hidden_in_the_code(name, expect_error):
    settings = compose_participation(name)
    choose("participation", settings)
    for key in sorted(set(settings) - {"name"}):
        with expect_error():
            choose("participation", {k: v for k, v in settings.items() if k != key})
