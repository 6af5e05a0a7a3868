"""How each partition deals out examples: sizes, class limits and shares, by hand and with the same generator."""

import random

import numpy as np
import pytest
from helpers import config_of
from parted import data_of, data_with_a_gap, make, settings_of

from contrafed.config.run_config import resolve
from contrafed.core.randomness import generator
from contrafed.data.federation import load_federation
from contrafed.data.partition import Draw
from contrafed.partitions.partitioners import iid
from contrafed.partitions.partitioners.balanced_dirichlet import split


def test_iid_sizes_differ_by_at_most_one():
    sizes = make("iid", clients=30).sizes
    assert sizes.max() - sizes.min() <= 1


def test_dirichlet_per_client_deals_in_proportion():
    """With the same generator: shares D / sum_n D of each class, to within rounding."""
    part = make("dirichlet", clients=5, alpha=1.0, min_client_size=0)
    rng = generator(0, "partition dirichlet", 0)
    y = data_of().y.numpy()
    for c in range(10):
        rng.permutation(np.flatnonzero(y == c))
    shares = rng.dirichlet(np.ones(10), 5)
    assert np.abs(part.class_counts() - 200 * shares / shares.sum(0)).max() <= 1.0


def test_dirichlet_per_class_sizes_are_roughly_balanced():
    assert make("dirichlet", scheme="per_class", min_client_size=50).sizes.min() >= 50
    assert ((make("dirichlet", scheme="per_class").class_counts() > 0).sum(1) < 10).any()


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_per_class_gives_a_client_that_has_its_mean_share_no_further_class(alpha):
    """2,000 examples over 20 clients, one class after another. A client with 100 before a class gets none of it."""
    counts = make("dirichlet", scheme="per_class", alpha=alpha, min_client_size=0).class_counts()
    full = counts.cumsum(1)[:, :-1] >= 2000 / 20
    assert full.any()
    assert not counts[:, 1:][full].any()


def test_balanced_dirichlet_sizes_are_exactly_equal():
    """FedRCL has 100 clients of 500 on 50,000 images. Here it is 100 of 50 on 5,000, more skewed for a smaller alpha."""
    data = data_of(5000)
    for alpha in (0.05, 0.6):
        assert (make("balanced_dirichlet", clients=100, data=data, alpha=alpha).sizes == 50).all()
    purity = [
        make("balanced_dirichlet", clients=100, data=data, alpha=alpha).class_proportions()[:50].max(1).mean()
        for alpha in (0.05, 0.6, 100.0)
    ]
    assert purity[0] > purity[1] > purity[2]


def test_balanced_dirichlet_parts_have_an_order_that_no_processor_changes():
    part = make("balanced_dirichlet", clients=10, alpha=0.3)
    assert all((np.diff(part.train(k)) > 0).all() for k in range(10))


def test_balanced_dirichlet_draws_by_the_weights_of_the_classes():
    """The first of many clients with a known q: its class counts are a weighted draw, compared with its expectation."""
    y = np.repeat(np.arange(4), 10_000)
    rng = generator(0, "x")
    q = generator(0, "x").dirichlet(np.full(4, 1.0))
    first = split(settings_of("balanced_dirichlet", alpha=1.0).config, Draw(y, 4, 400, rng, None))[0]
    assert np.bincount(y[first], minlength=4) / len(first) == pytest.approx(q, abs=0.12)


@pytest.mark.parametrize("clients", [10, 20, 37])
@pytest.mark.parametrize(
    ("each", "changes"),
    [
        (2, {}),
        (3, {"pieces": "random"}),
        (3, {"pieces": "uniform"}),
        (2, {"scheme": "shards"}),
        (2, {"scheme": "shards", "distinct": True}),
    ],
)
def test_pathological_class_limits(clients, each, changes):
    part = make("pathological", clients=clients, classes_per_client=each, **changes)
    held = (part.class_counts() > 0).sum(1)
    assert held.max() <= each
    assert part.class_counts().sum() == 2000  # every class has a holder
    if changes.get("distinct"):
        assert held.mean() == each


@pytest.mark.parametrize("pieces", ["equal", "random", "uniform"])
def test_pieces_of_a_class_are_equal_or_random(pieces):
    """20 clients of 2 classes: four holders of each class, of 200 examples."""
    counts = make("pathological", pieces=pieces).class_counts()
    assert (counts > 0).sum(0).tolist() == [4] * 10
    found = np.array([sorted(column[column > 0]) for column in counts.T])
    if pieces == "equal":
        assert (found == 50).all()
    elif pieces == "uniform":  # three between a tenth of an equal piece and all of it, and the rest
        assert found[:, 0].min() >= 5
        assert found[:, 2].max() < 50 < found[:, 3].min()
    else:
        assert (found[:, -1] - found[:, 0] > 1).all()
        assert len(set(map(tuple, found))) == 10


def test_pathological_by_hand():
    """4 clients, S = 2 and C = 4 give ceil(4 * 2 / 4) = 2 clients per class in id order."""
    # Classes 0, 1 go to clients 0, 1, and classes 2, 3 to clients 2, 3.
    part = make("pathological", clients=4, data=data_of(80, 4), classes_per_client=2)
    assert part.class_counts().tolist() == [[10, 10, 0, 0], [10, 10, 0, 0], [0, 0, 10, 10], [0, 0, 10, 10]]


def test_shards_by_hand():
    """MpFedcon: 10 clients, S = 2 and C = 10 give 2 shards of 100 per class, 200 examples a client."""
    for distinct in (False, True):
        part = make("pathological", clients=10, scheme="shards", distinct=distinct)
        assert (part.sizes == 200).all()
        counts = part.class_counts()
        assert set(np.unique(counts)) <= {0, 100, 200}
        if distinct:
            assert ((counts > 0).sum(1) == 2).all()


def test_lognormal_sizes():
    part = make("lognormal", clients=200, data=data_of(40_000), mean_size=100, classes_per_client=3, sigma=0.5)
    assert ((part.class_counts() > 0).sum(1) <= 3).all()
    assert part.sizes.mean() == pytest.approx(100, rel=0.1)
    assert np.log(part.sizes).std() == pytest.approx(0.5, rel=0.15)


def test_lognormal_clients_that_want_more_of_a_class_than_there_is_all_get_proportionally_less():
    """Twenty clients of 1,000 examples in three classes need 600 of each of the ten, which has 200."""
    # Each gets a share by its size.
    sizes = generator(0, "partition lognormal", 0).lognormal(np.log(1000) - 0.5**2 / 2, 0.5, 20)
    counts = make("lognormal", mean_size=1000, sigma=0.5, min_client_size=0).class_counts()
    wanted = np.where(counts > 0, sizes[:, None] / 3, 0)
    assert ((counts > 0).sum(1) == 3).all()
    assert (wanted.sum(0) > 200).all()
    assert counts.sum(0).tolist() == [200] * 10
    assert np.abs(counts - 200 * wanted / wanted.sum(0)).max() <= 1
    # and what they want where there is enough
    few = make("lognormal", mean_size=30, sigma=0.5, min_client_size=0).class_counts()
    assert np.abs(few - np.where(few > 0, 0.03 * sizes[:, None] / 3, 0)).max() <= 1


def test_natural_clients_are_whole_owners(expect_error):
    owner = np.random.default_rng(0).integers(0, 50, 2000)
    data = data_of(owner=owner)
    part = make("natural", clients=12, data=data)
    for k in range(12):
        (who,) = np.unique(owner[part.train(k)])
        assert len(part.train(k)) == (owner == who).sum()
    with expect_error("num_clients"):
        make("natural", clients=51, data=data)
    with expect_error("partition"):
        make("natural")


@pytest.mark.parametrize("scheme", ["per_class", "per_client"])
def test_dirichlet_with_classes_that_have_no_example(scheme):
    assert make("dirichlet", clients=5, data=data_with_a_gap(), scheme=scheme).sizes.sum() == 2000


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("pathological", {}),
        ("pathological", {"scheme": "shards", "distinct": True}),
        ("lognormal", {"mean_size": 100, "sigma": 0.5}),
    ],
)
def test_only_classes_that_have_examples_are_dealt(name, changes):
    part = make(name, clients=10, data=data_with_a_gap(), classes_per_client=2, **changes)
    assert ((part.class_counts() > 0).sum(1) == 2).all()


def test_the_practical_partition_is_the_dirichlet_ones_scheme_by_class():
    practical, by_class = make("practical", alpha=0.3), make("dirichlet", alpha=0.3, scheme="per_class")
    assert all(np.array_equal(practical.train(k), by_class.train(k)) for k in range(20))


@pytest.mark.parametrize(("name", "draws"), [("numpy.random", lambda: np.random.rand()), ("random", random.random)])  # noqa: NPY002
def test_a_partition_draws_from_its_own_generator(monkeypatch, name, draws, expect_error):
    monkeypatch.setattr(iid, "split", lambda config, draw: [np.array([int(9 * draws())]), np.array([10])])
    with expect_error("partition"):
        load_federation(resolve(config_of("partition=iid", "num_clients=2")).client)


def test_an_import_of_a_partition_may_draw(monkeypatch):
    """It draws in the first call alone."""
    imported = []

    def import_and_split(config, draw):
        if not imported:
            imported.append(random.random())
        return [np.array([0]), np.array([1])]

    monkeypatch.setattr(iid, "split", import_and_split)
    load_federation(resolve(config_of("partition=iid", "num_clients=2", "partition.min_client_size=1")).client)
    assert imported
