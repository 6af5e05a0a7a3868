"""Aggregations in place of a mean: by hand, in cases that equal the mean, and for strategies that accept none."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import close, config_of, digits_run, slow
from tiny import run_tiny

from contrafed.config.run_config import resolve
from contrafed.core.client_run import choose
from contrafed.server.aggregation import make_aggregation, share_of
from contrafed.server.base import FederatedStrategy
from contrafed.server.prototypes import Prototypes
from contrafed.server.replies import Replies, Reply
from contrafed.strategies.fedavg import FedAvg

AVERAGING = {
    "fedavg": ("fedavg", "fedavgm", "fedadam", "fedyogi", "fedadagrad", "fedagm", "fedhyper", "pfedme"),
    "own": ("fedcrl", "mpfedcon", "fedproto", "fedproc", "fedppo"),
}
MEDIANS = ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_clip")


def make(name, **changes):
    return make_aggregation(choose("aggregation", config_of(f"aggregation={name}")["aggregation"] | changes))


def combine_points(name, points, weights=None, **changes):
    """Return the aggregate of updates of two tensors: the first number of each point, and the rest."""
    rows = [{"a": torch.tensor(point[:1]), "b": torch.tensor([point[1:]])} for point in points]
    weights = np.ones(len(points)) if weights is None else np.array(weights, dtype=np.float64)
    found = make(name, **changes).combine(rows, weights / weights.sum())
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    assert found["b"].shape == rows[0]["b"].shape
    return [*found["a"].tolist(), *found["b"][0].tolist()]


def test_the_plain_mean_is_the_rules_own():
    assert make("mean") is None


@pytest.mark.parametrize(
    ("name", "changes", "points", "weights", "expected"),
    [
        ("median", {}, [[1.0, 9.0], [2.0, -5.0], [50.0, 7.0]], [9, 1, 1], [2, 7]),
        ("median", {}, [[1.0, 0.0], [2.0, 1.0], [4.0, 8.0], [9.0, 2.0]], None, [3, 1.5]),
        # floor(0.3 * 5) = 1 at either end: (2 + 3 + 4) / 3 and (0 + 1 + 5) / 3.
        ("trimmed_mean", {"trim": 0.3}, [[1.0, 5.0], [2.0, 0.0], [3.0, 1.0], [4.0, 99.0], [90.0, -9.0]], None, [3, 2]),
        # Squared distances 1 (0 and 1), 0.25 (1 and 1.5), 72.25 (1.5 and 10): one nearest of m - f - 2 = 4 - 1 - 2.
        ("krum", {"assumed": 0.3}, [[0.0, 0.0], [1.0, 0.0], [1.5, 0.0], [10.0, 0.0]], None, [1, 0]),
        # Both tensors count: (0, 0) and (0, 3) are farther apart than (3, 3) and (4, 4).
        ("krum", {"assumed": 0.3}, [[0.0, 0.0], [0.0, 3.0], [9.0, 3.0], [10.0, 4.0]], None, [9, 3]),
        # The best int(0.6 * 4) = 2, by weights 1 and 3.
        ("multi_krum", {"assumed": 0.3}, [[0.0, 0.0], [1.0, 0.0], [1.5, 0.0], [10.0, 0.0]], [1, 1, 3, 1], [1.375, 0]),
        ("geometric_median", {"iterations": 200}, [[0.0, 0.0], [1.0, 0.0], [50.0, 0.0]], None, [1, 0]),
        ("geometric_median", {"iterations": 200}, [[0.0, 0.0], [1.0, 0.0], [50.0, 0.0]], [1, 1, 3], [50, 0]),
        # One step from the mean (0, 1), at distances sqrt(2), sqrt(2) and 2: (3 / 2) / (2 / sqrt(2) + 1 / 2).
        ("geometric_median", {"iterations": 1}, [[-1.0, 0.0], [1.0, 0.0], [0.0, 3.0]], None, [0, 1.5 / (0.5 + 2**0.5)]),
        # Lengths 5, 10 and 1: the median 5 halves the second.
        ("norm_clip", {}, [[3.0, 4.0], [6.0, 8.0], [1.0, 0.0]], None, [7 / 3, 8 / 3]),
        ("norm_clip", {"bound": 1.0}, [[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]], [1, 1, 2], [0.3, 0.4]),
    ],
)
def test_by_hand(name, changes, points, weights, expected):
    assert combine_points(name, points, weights, **changes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("share", "count", "expected"), [(0.29, 100, 29), (0.35, 180, 63), (0.7, 90, 63), (0.3, 9, 2), (0.3, 0, 0)]
)
def test_a_share_of_replies_is_that_of_the_decimal_that_was_written(share, count, expected):
    assert share_of(share, count) == expected


def test_a_trimmed_mean_cuts_as_many_as_are_said():
    """63 of 180 at either end, although 0.35 * 180 is 62.99 in binary."""
    points = [[1e6 if k < 63 else 1.0, 0.0] for k in range(180)]
    assert combine_points("trimmed_mean", points, trim=0.35) == pytest.approx([1, 0])


@pytest.mark.parametrize("name", MEDIANS)
def test_equal_replies_are_the_answer_and_a_lone_one_too(name):
    for count in (1, 2, 5):
        assert combine_points(name, [[2.0, -1.0]] * count, range(1, count + 1)) == pytest.approx([2, -1])


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_an_aggregation_by_coordinate_goes_with_averaged_buffers(tmp_path, name):
    run = ("engine=local", "num_rounds=1", "strategy=fedavg", "model=cnn_bn", f"aggregation={name}")
    assert run_tiny(tmp_path / name, *run)[0]["status"] == "finished"


@pytest.mark.parametrize("name", MEDIANS)
def test_clients_that_send_nothing_of_the_model_leave_it(tmp_path, name):
    """FedPer's body has no layer here, and MpFedcon sends only prototypes."""
    for method in ("fedper", "mpfedcon"):
        asked = ("engine=local", "num_rounds=1", f"strategy={method}", "model=mlp", "model.hidden=[]", f"aggregation={name}")
        assert run_tiny(tmp_path / method, *asked)[0]["status"] == "finished"


@pytest.mark.parametrize("name", [name for name in MEDIANS if name != "norm_clip"])
def test_three_of_ten_far_away_move_it_little(name):
    honest = [[1.0 + 0.01 * k, -1.0] for k in range(7)]
    found = combine_points(name, [*honest, *[[1e4, 1e4]] * 3])
    assert found == pytest.approx([1.03, -1], abs=1 if name == "geometric_median" else 0.04)


def test_clipped_attackers_count_no_more_than_others():
    assert combine_points("norm_clip", [[1.0, 0.0]] * 7 + [[-1e6, 0.0]] * 3) == pytest.approx([0.4, 0])


@pytest.mark.parametrize("name", AVERAGING["fedavg"])
def test_a_trimmed_mean_that_trims_nothing_is_the_mean(name):
    how = {"clients": 3, "server": name, "weights": "uniform"}
    plain, _ = digits_run("fedavg", 2, **how)
    trimmed, _ = digits_run("fedavg", 2, **how, aggregation=make("trimmed_mean", trim=0))
    close(plain[-1], trimmed[-1], 1e-9)


@pytest.mark.parametrize("name", ["fedcrl", slow("mpfedcon"), slow("fedproto")])
def test_a_clip_that_clips_nothing_is_the_mean_of_models_and_prototypes(name):
    plain, one = digits_run(name, 1, clients=3)
    clipped, other = digits_run(name, 1, clients=3, aggregation=make("norm_clip", bound=1e9))
    close(plain[-1], clipped[-1], 1e-9)
    torch.testing.assert_close(one.state["means"], other.state["means"], rtol=1e-9, atol=1e-12)


def test_prototypes_are_combined_by_class_among_their_holders():
    """Class 0 has three holders (1, 2, 90) and gets the median 2. Class 1 has one. Class 2 has none and keeps its value."""
    tables = [([1.0, 0.0, 0.0], [5.0, 0.0, 0.0]), ([2.0, 7.0, 0.0], [1.0, 4.0, 0.0]), ([90.0, 0.0, 0.0], [1.0, 0.0, 0.0])]
    replies = Replies(
        (
            Reply(k, {"proto/mean": torch.tensor(means).unsqueeze(1), "proto/count": torch.tensor(counts)}, 1, {})
            for k, (means, counts) in enumerate(tables)
        ),
        make("median"),
    )
    state = {}
    table = Prototypes(state, {"proto/mean": (3, 1), "proto/valid": (3,)})
    state["means"][2] = 4.0
    table.merge(replies, "class_count")
    assert state["means"].flatten().tolist() == [2, 7, 4]
    assert state["valid"].tolist() == [1, 1, 0]


def test_exactly_the_rules_that_take_nothing_but_means_say_so():
    names = [path.stem for path in (Path(__file__).resolve().parent.parent / "strategies").glob("*.py")]
    rules = {name: importlib.import_module(f"contrafed.strategies.{name}") for name in names}
    found = [value for rule in rules.values() for value in vars(rule).values() if isinstance(value, type)]
    own = {value.__module__.rpartition(".")[2]: value for value in found if issubclass(value, FederatedStrategy)}
    assert {name for name, rule in own.items() if vars(rule).get("linear_in_updates")} == {
        *AVERAGING["fedavg"],
        *AVERAGING["own"],
    }


def test_a_rule_of_ones_own_says_so_itself(monkeypatch, expect_error):
    """A strategy that inherits FedAvg may use replies differently."""

    class Mine(FedAvg):
        pass

    monkeypatch.setattr("contrafed.config.validate.strategy_class_of", lambda server: Mine)
    asked = config_of("strategy=fedavg", "aggregation=median")
    with expect_error("aggregation"):
        resolve(asked)
    Mine.linear_in_updates = True
    assert resolve(asked).aggregation.name == "median"
