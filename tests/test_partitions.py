"""Who holds what: sizes, class limits, reproducibility, scarcity, files, and refusals with the numbers."""

import json

import numpy as np
import pytest
from rig import config_of, with_images

from core.errors import UserError
from core.run import choose
from partitions.partition import check, keep_stratified, make_partition


def data_of(count=2000, classes=10, test=0, owner=None, seed=0):
    y = np.random.default_rng(seed).permutation(np.arange(count) % classes).astype(np.int64)
    x = np.zeros((count, 1, 8, 8), dtype=np.uint8)
    mask = np.arange(count) >= count - test
    return with_images(x, y, mask, owner, classes)


def data_with_a_gap():
    """Ten classes, the last two without an example."""
    y = (np.arange(2000) % 8).astype(np.int64)
    return with_images(np.zeros((2000, 1, 8, 8), dtype=np.uint8), y, np.zeros(2000, dtype=bool), None, 10)


def settings_of(name, **changes):
    return choose("partition", config_of(f"partition={name}")["partition"] | changes)


def make(name, nodes=20, seed=0, data=None, merged=False, **changes):
    return make_partition(settings_of(name, **changes), data or data_of(), nodes, seed, merged)


DRAWN = [
    ("iid", {}),
    ("dirichlet", {}),
    ("dirichlet", {"scheme": "per_class"}),
    ("balanced_dirichlet", {}),
    ("pathological", {}),
    ("pathological", {"pieces": "random"}),
    ("pathological", {"scheme": "shards"}),
    ("pathological", {"scheme": "shards", "distinct": True}),
    ("lognormal", {"mean_size": 50}),
]


@pytest.mark.parametrize(("name", "changes"), DRAWN)
def test_partitions_are_disjoint_in_range_and_a_function_of_the_seed(name, changes):
    data = data_of(test=300)
    part = make(name, data=data, **changes)
    every = np.concatenate([part.train(k) for k in range(20)])
    assert len(np.unique(every)) == len(every)
    assert not data.test.numpy()[every].any()
    assert part.sizes.tolist() == [len(part.train(k)) for k in range(20)]
    assert part.sizes.min() >= 4
    counts = part.class_counts()
    assert counts.shape == (20, 10)
    for k in (0, 7):
        assert counts[k].tolist() == np.bincount(data.y.numpy()[part.train(k)], minlength=10).tolist()
    assert part.class_proportions().sum(1) == pytest.approx(np.ones(20))
    again, other = make(name, data=data, **changes), make(name, data=data, seed=1, **changes)
    assert all(np.array_equal(part.train(k), again.train(k)) for k in range(20))
    assert any(not np.array_equal(part.train(k), other.train(k)) for k in range(20))
    if name != "lognormal":
        assert len(every) == (1700 if name != "balanced_dirichlet" else 1700 // 20 * 20)


def test_iid_sizes_differ_by_at_most_one():
    sizes = make("iid", nodes=30).sizes
    assert sizes.max() - sizes.min() <= 1


@pytest.mark.parametrize("on_small", ["move", "drop"])
def test_a_node_without_examples_may_have_an_array_of_any_type(monkeypatch, on_small):
    settings = settings_of("iid", on_small=on_small, min_node_size=5)
    monkeypatch.setattr(settings.module, "split", lambda config, draw: [np.arange(len(draw.y)), np.array([])])
    part = make_partition(settings, data_of(), 2, 0, False)
    assert part.sizes.tolist() == ([1995, 5] if on_small == "move" else [2000, 0])


def test_dirichlet_per_node_deals_in_proportion():
    """With the same generator: shares D / sum_n D of each class, to within rounding."""
    from core.randomness import generator

    part = make("dirichlet", nodes=5, alpha=1.0, min_node_size=0)
    rng = generator(0, "partition dirichlet", 0)
    y = data_of().y.numpy()
    for c in range(10):
        rng.permutation(np.flatnonzero(y == c))
    shares = rng.dirichlet(np.ones(10), 5)
    assert np.abs(part.class_counts() - 200 * shares / shares.sum(0)).max() <= 1.0


def test_dirichlet_per_class_sizes_are_roughly_balanced():
    sizes = make("dirichlet", scheme="per_class", min_node_size=50).sizes
    assert sizes.min() >= 50
    skewed = make("dirichlet", scheme="per_class").class_counts()
    assert ((skewed > 0).sum(1) < 10).any()


def test_balanced_dirichlet_sizes_are_exactly_equal():
    """FedRCL: 100 clients of 500 on 50,000 images; here 100 of 50 on 5,000, more skewed for a smaller alpha."""
    data = data_of(5000)
    for alpha in (0.05, 0.6):
        assert (make("balanced_dirichlet", nodes=100, data=data, alpha=alpha).sizes == 50).all()
    purity = [
        make("balanced_dirichlet", nodes=100, data=data, alpha=alpha).class_proportions()[:50].max(1).mean()
        for alpha in (0.05, 0.6, 100.0)
    ]
    assert purity[0] > purity[1] > purity[2]


def test_balanced_dirichlet_draws_by_the_weights_of_the_classes():
    """The first node of many with q known: its class counts are a weighted draw, here against its expectation."""
    from core.randomness import generator
    from partitions.partition import Draw
    from partitions.partitioners.balanced_dirichlet import split

    y = np.repeat(np.arange(4), 10_000)
    rng = generator(0, "x")
    q = generator(0, "x").dirichlet(np.full(4, 1.0))
    first = split(settings_of("balanced_dirichlet", alpha=1.0).config, Draw(y, 4, 400, rng, None))[0]
    assert np.bincount(y[first], minlength=4) / len(first) == pytest.approx(q, abs=0.12)


@pytest.mark.parametrize("nodes", [10, 20, 37])
@pytest.mark.parametrize(("each", "changes"), [(2, {}), (3, {"pieces": "random"}), (2, {"scheme": "shards"})])
def test_pathological_class_limits(nodes, each, changes):
    part = make("pathological", nodes=nodes, classes_per_node=each, **changes)
    held = (part.class_counts() > 0).sum(1)
    assert held.max() <= each
    assert part.class_counts().sum() == 2000  # every class has a holder


def test_pathological_by_hand():
    """4 nodes, S = 2, C = 4: ceil(4 * 2 / 4) = 2 nodes per class in id order: classes 0, 1 to nodes 0, 1; 2, 3 to 2, 3."""
    part = make("pathological", nodes=4, data=data_of(80, 4), classes_per_node=2)
    assert part.class_counts().tolist() == [[10, 10, 0, 0], [10, 10, 0, 0], [0, 0, 10, 10], [0, 0, 10, 10]]


def test_shards_by_hand():
    """MpFedcon: 10 nodes, S = 2, C = 10 give 2 shards of 100 per class, 200 examples a node."""
    for distinct in (False, True):
        part = make("pathological", nodes=10, scheme="shards", distinct=distinct)
        assert (part.sizes == 200).all()
        counts = part.class_counts()
        assert set(np.unique(counts)) <= {0, 100, 200}
        if distinct:
            assert ((counts > 0).sum(1) == 2).all()


def test_lognormal_sizes():
    part = make("lognormal", nodes=200, data=data_of(40_000), mean_size=100, classes_per_node=3, sigma=0.5)
    assert ((part.class_counts() > 0).sum(1) <= 3).all()
    assert part.sizes.mean() == pytest.approx(100, rel=0.1)
    logs = np.log(part.sizes)
    assert logs.std() == pytest.approx(0.5, rel=0.15)


def test_natural_nodes_are_whole_owners():
    owner = np.random.default_rng(0).integers(0, 50, 2000)
    data = data_of(owner=owner)
    part = make("natural", nodes=12, data=data)
    for k in range(12):
        (who,) = np.unique(owner[part.train(k)])
        assert len(part.train(k)) == (owner == who).sum()
    with pytest.raises(UserError, match="num_nodes=51 is more than the 50"):
        make("natural", nodes=51, data=data)
    with pytest.raises(UserError, match="say who each example comes from"):
        make("natural")


def test_own_test_parts():
    part = make("iid", merged=True)
    assert [len(part.test(k)) for k in range(20)] == [25] * 20
    assert part.sizes.tolist() == [75] * 20
    assert not set(part.test(3)) & set(part.train(3))
    assert make("iid").test(0).tolist() == []
    assert len(make("iid", test_fraction=0.1).test(0)) == 10
    # The last example is for training: a node with a test part alone could not take part.
    assert make("iid", nodes=2000, merged=True, min_node_size=1, test_fraction=0.9).sizes.tolist() == [1] * 2000


@pytest.mark.parametrize(("name", "changes"), [("pathological", {"scheme": "shards"}), ("dirichlet", {}), ("iid", {})])
def test_the_central_test_split_is_dealt_out_as_the_classes_are(name, changes):
    data = data_of(2500, test=500)
    part = make(name, data=data, deal_test=True, **changes)
    every = np.concatenate([part.test(k) for k in range(20)])
    assert sorted(every) == list(range(2000, 2500))
    y = data.y.numpy()
    for k in range(20):
        mine = np.bincount(y[part.test(k)], minlength=10)
        share = np.bincount(y[2000:], minlength=10) / np.bincount(y[:2000], minlength=10)
        assert np.abs(mine - part.class_counts()[k] * share).max() <= 1.0
    assert part.sizes.sum() == 2000


def test_dealing_the_test_split_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="deal_test needs a central test split"):
        make("iid", merged=True, deal_test=True)
    with pytest.raises(UserError, match="deal_test and partition.test_fraction both say"):
        make("iid", data=data_of(test=100), deal_test=True, test_fraction=0.1)
    with pytest.raises(UserError, match="sampled has no partition.deal_test"):
        make("sampled", data=data_of(test=100), deal_test=True)


def test_scarcity_keeps_the_label_distribution():
    """n = 7, r = 0.1 keeps 1; n = 40 keeps 4."""
    y = np.repeat([0, 1], [7, 40])
    kept = keep_stratified(np.arange(47), y, 0.1, np.random.default_rng(0))
    assert np.bincount(y[kept]).tolist() == [1, 4]
    lone = keep_stratified(np.arange(7), y, 0.05, np.random.default_rng(0))
    assert len(lone) == 2  # at least two in all
    plain = make("dirichlet", merged=True)
    whole = make("dirichlet", merged=True, keep_fraction=1.0, scarce_nodes=5, scarce_fraction=1.0)
    assert all(np.array_equal(plain.train(k), whole.train(k)) for k in range(20))
    scarce = make("dirichlet", merged=True, scarce_nodes=5)
    assert all(np.array_equal(plain.train(k), scarce.train(k)) for k in range(15))
    assert all(np.array_equal(plain.test(k), scarce.test(k)) for k in range(20))
    for k in range(15, 20):
        before, after = plain.class_counts()[k], scarce.class_counts()[k]
        expected = np.where(before > 0, np.maximum(1, np.round(0.1 * before)), 0)
        assert (after >= expected).all()
        assert after.sum() == max(expected.sum(), min(2, before.sum()))


def test_scarcity_cuts_test_parts_only_when_asked_to():
    whole = make("dirichlet", merged=True)
    for cut in (False, True):
        part = make("dirichlet", merged=True, scarce_nodes=5, cut_test=cut)
        assert [len(part.test(k)) for k in range(15)] == [len(whole.test(k)) for k in range(15)]
        for k in range(15, 20):
            assert set(part.test(k)) <= set(whole.test(k))
            kept = len(part.test(k)) / len(whole.test(k))
            assert kept < 0.5 if cut else kept == 1


def test_per_class_with_classes_that_have_no_example():
    part = make("dirichlet", nodes=5, data=data_with_a_gap(), scheme="per_class")
    assert part.sizes.sum() == 2000


def test_redraws_until_large_enough():
    assert make("dirichlet", alpha=0.5, min_node_size=20, max_redraws=500, on_small="error").sizes.min() >= 20


@pytest.mark.parametrize(
    ("name", "nodes", "changes", "message"),
    [
        ("iid", 3000, {}, "3000 nodes cannot share 2000 training examples"),
        ("iid", 500, {"min_node_size": 5}, "need 2500, the training split has 2000"),
        ("pathological", 20, {"classes_per_node": 11}, "classes_per_node=11 is more than the 10 classes"),
        ("pathological", 4, {"classes_per_node": 2}, "hold at most 8 of the 10 classes"),
        ("lognormal", 20, {"classes_per_node": 11}, "classes_per_node=11 is more than the 10 classes"),
        ("dirichlet", 20, {"alpha": 0}, "partition.alpha must be > 0, got 0"),
        ("dirichlet", 20, {"alfa": 1}, "unknown partition key 'alfa', did you mean 'alpha'"),
        ("iid", 20, {"scarce_nodes": 21}, "scarce_nodes=21 is more than num_nodes=20"),
        ("file", 20, {}, "needs partition.path"),
        ("file", 20, {"path": "/nowhere.json"}, "no file /nowhere.json"),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(name, nodes, changes, message):
    with pytest.raises(UserError, match=message) as error:
        check(settings_of(name, **changes), nodes)
        make(name, nodes, **changes)
    assert "\n" not in str(error.value)


LISTS = [[0, 5, 2], [1, 9], [7, 8, 3, 4]]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(LISTS),
        json.dumps({str(k): part for k, part in enumerate(LISTS)}),
        str(dict(enumerate(LISTS))),
        str({str(k): part for k, part in reversed(list(enumerate(LISTS)))}),
        json.dumps({"train": LISTS, "test": [[10], [], [11]]}),
    ],
)
def test_partition_from_a_file(tmp_path, text):
    file = tmp_path / "nodes.txt"
    file.write_text(text)
    part = make("file", nodes=3, path=str(file), min_node_size=0)
    assert [part.train(k).tolist() for k in range(3)] == LISTS
    assert [part.test(k).tolist() for k in range(3)] == ([[10], [], [11]] if "test" in text else [[], [], []])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1]]", "has 2 nodes, num_nodes=3"),
        ("[[0], [1], [1]]", "1 indices occur more than once"),
        ("[[0], [1], [2000]]", r"must be in 0\.\.1999, found 0\.\.2000"),
        ("[[0], [1], [1999]]", "1 indices point into the central test split"),
        ("[[0], [1], [0.5]]", "must be whole numbers"),
        ("[[0], [1], [true]]", "must be whole numbers, found 'True'"),
        ("[[0], [1], [99999999999999999999]]", "must be whole numbers, found '9999"),
        ("[[0], [1], [[2]]]", "must be whole numbers"),
        ("[" * 100_000, "neither JSON nor a Python dictionary"),
        ("{[1]: [2]}", "neither JSON nor a Python dictionary"),
        ("hello", "neither JSON nor a Python dictionary"),
        ('{"a": [1]}', "keys of the dictionary must be node numbers"),
        ("3", "must hold a list of index lists"),
    ],
)
def test_faulty_files_are_one_line(tmp_path, text, message):
    file = tmp_path / "nodes.txt"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        make("file", nodes=3, path=str(file), data=data_of(test=10))
    assert "\n" not in str(error.value)


def test_published_partitions_are_used_as_they_are(tmp_path):
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps([[0], [], list(range(1, 50))]))
    part = make("file", nodes=3, path=str(file))
    assert part.sizes.tolist() == [1, 0, 49]


def test_what_is_moved_in_a_published_partition_is_counted_before_test_parts_are_held_out(tmp_path):
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps([[0, 1], list(range(2, 50))]))
    part = make("file", nodes=2, path=str(file), min_node_size=8, test_fraction=0.25)
    assert part.sizes.tolist() == [6, 32]
    assert (part.small.nodes, part.small.moved, part.small.dropped) == (1, 6, 0)


@pytest.mark.parametrize("changes", [{"test_fraction": 0.2}, {"scarce_nodes": 3}, {"keep_fraction": 0.5}])
def test_sampled_refuses_what_it_would_ignore(changes):
    with pytest.raises(UserError, match=f"partition=sampled has no partition.{next(iter(changes))}"):
        make("sampled", **changes)
    with pytest.raises(UserError, match="no test parts of its own; set dataset.merge_splits=false"):
        make("sampled", merged=True)


def test_sampled_nodes_have_the_counts_that_are_told():
    data = data_with_a_gap()
    part = make("sampled", nodes=600, data=data, examples_per_node=40, alpha=0.1)
    counts = part.class_counts()
    assert counts.shape == (600, 10)
    assert (counts.sum(1) == 40).all()
    assert not counts[:, 8:].any()
    for k in (0, 255, 256, 599):
        assert np.bincount(data.y.numpy()[part.train(k)], minlength=10).tolist() == counts[k].tolist()


def test_a_million_sampled_nodes_are_drawn_when_asked_for(monkeypatch):
    data = data_of()
    part = make("sampled", nodes=1_000_000, data=data, examples_per_node=30, alpha=0.1)
    assert part.sizes.shape == (1_000_000,)
    assert part.sizes.strides == (0,)  # one number seen a million times
    examples = part.train(999_999)
    assert len(examples) == 30
    assert np.array_equal(examples, make("sampled", nodes=1_000_000, data=data, examples_per_node=30, alpha=0.1).train(999_999))
    assert not np.array_equal(examples, part.train(999_998))
    few = make("sampled", nodes=5000, data=data, examples_per_node=2000, alpha=0.1)
    q = few.class_proportions()
    assert q.sum(1) == pytest.approx(np.ones(5000))
    for k in (0, 4500):
        drawn = np.bincount(data.y.numpy()[few.train(k)], minlength=10) / 2000
        assert drawn == pytest.approx(q[k], abs=0.05)


def test_sampled_without_skew_has_the_balance_of_the_data():
    part = make("sampled", nodes=5000)
    assert part.class_proportions()[17] == pytest.approx(np.full(10, 0.1))
    assert part.test(3).tolist() == []


def test_the_practical_partition_is_the_dirichlet_ones_scheme_by_class():
    practical, by_class = make("practical", alpha=0.3), make("dirichlet", alpha=0.3, scheme="per_class")
    assert all(np.array_equal(practical.train(k), by_class.train(k)) for k in range(20))
