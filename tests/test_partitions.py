"""Partitions: reproducibility, test parts, scarcity, files, and refusals with the numbers."""

import json

import numpy as np
import pytest
from helpers import config_of
from parted import data_of, data_with_a_gap, make, settings_of

from contrafed.config.run_config import resolve
from contrafed.data.checks import check
from contrafed.data.federation import load_federation
from contrafed.data.partition import Small, keep_stratified, make_partition
from contrafed.runs.run import run

DRAWN_PARTITIONS = [
    ("iid", {}), ("dirichlet", {}), ("dirichlet", {"scheme": "per_class"}), ("balanced_dirichlet", {}), ("pathological", {}),
    ("pathological", {"pieces": "random"}), ("pathological", {"scheme": "shards"}),
    ("pathological", {"scheme": "shards", "distinct": True}), ("lognormal", {"mean_size": 50}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), DRAWN_PARTITIONS)
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


@pytest.mark.parametrize("on_small", ["move", "drop"])
def test_a_client_without_examples_may_have_an_array_of_any_type(monkeypatch, on_small):
    settings = settings_of("iid", on_small=on_small, min_client_size=5)
    monkeypatch.setattr(settings.module, "split", lambda config, draw: [np.arange(len(draw.y)), np.array([])])
    part = make_partition(settings, data_of(), 2, 0, False)
    assert part.sizes.tolist() == ([1995, 5] if on_small == "move" else [2000, 0])


def test_own_test_parts():
    part = make("iid", merged=True)
    assert [len(part.test(k)) for k in range(20)] == [25] * 20
    assert part.sizes.tolist() == [75] * 20
    assert not set(part.test(3)) & set(part.train(3))
    assert make("iid").test(0).tolist() == []
    assert len(make("iid", test_fraction=0.1).test(0)) == 10
    # The last example is for training, because a client with a test part alone cannot participate.
    assert make("iid", clients=2000, merged=True, min_client_size=1, test_fraction=0.9).sizes.tolist() == [1] * 2000


@pytest.mark.parametrize(("name", "changes"), [("pathological", {"scheme": "shards"}), ("dirichlet", {}), ("iid", {})])
def test_the_central_test_split_is_dealt_out_as_the_classes_are(name, changes):
    data = data_of(2500, test=500)
    part = make(name, data=data, deal_test=True, **changes)
    assert sorted(np.concatenate([part.test(k) for k in range(20)])) == list(range(2000, 2500))
    y = data.y.numpy()
    for k in range(20):
        mine = np.bincount(y[part.test(k)], minlength=10)
        share = np.bincount(y[2000:], minlength=10) / np.bincount(y[:2000], minlength=10)
        assert np.abs(mine - part.class_counts()[k] * share).max() <= 1.0
    assert part.sizes.sum() == 2000


def test_the_central_test_split_is_dealt_to_its_owners(expect_error):
    owner = np.arange(2000) % 25
    part = make("natural", data=data_of(test=500, owner=owner), deal_test=True)
    for client in range(20):
        assert np.unique(owner[part.test(client)]).tolist() == np.unique(owner[part.train(client)]).tolist()
        assert len(part.test(client)) == 20
    few = np.concatenate([np.zeros(3), np.repeat(np.arange(1, 20), 40), np.repeat(np.arange(20), 5)]).astype(int)
    for on_small, tested in (("move", 5), ("drop", 0)):  # the client of owner 0 gets examples of others, or none
        part = make(
            "natural", data=data_of(len(few), test=100, owner=few), deal_test=True, on_small=on_small, min_client_size=9
        )
        sizes = {few[part.test(client)[0]]: len(part.test(client)) for client in range(20) if len(part.test(client))}
        assert (sizes.get(0, 0), len(sizes)) == (tested, 19 + bool(tested))
    with expect_error("partition.deal_test"):
        make("natural", data=data_of(test=500, owner=np.where(np.arange(2000) < 1500, owner, 99)), deal_test=True)


def test_dealing_the_test_split_is_refused_where_there_is_none(expect_error):
    with expect_error("partition.deal_test"):
        make("iid", merged=True, deal_test=True)
    with expect_error("partition.deal_test"):
        make("iid", data=data_of(test=100), deal_test=True, test_fraction=0.1)
    with expect_error("partition"):
        make("sampled", data=data_of(test=100), deal_test=True)


def test_scarcity_keeps_the_label_distribution():
    """n = 7, r = 0.1 keeps 1; n = 40 keeps 4."""
    y = np.repeat([0, 1], [7, 40])
    kept = keep_stratified(np.arange(47), y, 0.1, np.random.default_rng(0))
    assert np.bincount(y[kept]).tolist() == [1, 4]
    assert len(keep_stratified(np.arange(7), y, 0.05, np.random.default_rng(0))) == 2  # at least two in all
    plain = make("dirichlet", merged=True)
    whole = make("dirichlet", merged=True, keep_fraction=1.0, scarce_clients=5, scarce_fraction=1.0)
    assert all(np.array_equal(plain.train(k), whole.train(k)) for k in range(20))
    scarce = make("dirichlet", merged=True, scarce_clients=5)
    assert all(np.array_equal(plain.train(k), scarce.train(k)) for k in range(15))
    assert all(np.array_equal(plain.test(k), scarce.test(k)) for k in range(20))
    for k in range(15, 20):
        before, after = plain.class_counts()[k], scarce.class_counts()[k]
        expected = np.where(before > 0, np.maximum(1, np.round(0.1 * before)), 0)
        assert (after >= expected).all()
        assert after.sum() == max(expected.sum(), min(2, before.sum()))


def test_all_clients_are_thinned_and_the_scarce_ones_further():
    """Of every class max(1, round(0.5 n)) examples, on the last five clients max(1, round(0.5 * 0.1 n))."""
    whole, kept = make("dirichlet").class_counts(), make("dirichlet", keep_fraction=0.5, scarce_clients=5).class_counts()
    fractions = np.where(np.arange(20) < 15, 0.5, 0.05)[:, None]
    expected = np.where(whole > 0, np.maximum(1, np.round(fractions * whole)), 0)
    assert (expected.sum(1) >= 2).all()  # fewer would be made 2
    assert (expected[15:] > 1).any()
    assert kept.tolist() == expected.tolist()


def test_scarcity_cuts_test_parts_only_when_asked_to():
    whole = make("dirichlet", merged=True)
    for cut in (False, True):
        part = make("dirichlet", merged=True, scarce_clients=5, cut_test=cut)
        assert [len(part.test(k)) for k in range(15)] == [len(whole.test(k)) for k in range(15)]
        for k in range(15, 20):
            assert set(part.test(k)) <= set(whole.test(k))
            kept = len(part.test(k)) / len(whole.test(k))
            assert kept < 0.5 if cut else kept == 1


def test_redraws_until_large_enough():
    assert make("dirichlet", alpha=0.5, min_client_size=20, max_redraws=500, on_small="error").sizes.min() >= 20


@pytest.mark.parametrize(
    ("name", "clients", "changes"),
    [
        ("iid", 3000, {}),
        ("iid", 500, {"min_client_size": 5}),
        ("pathological", 20, {"classes_per_client": 11}),
        ("pathological", 4, {"classes_per_client": 2}),
        ("lognormal", 20, {"classes_per_client": 11}),
        ("dirichlet", 20, {"alpha": 0}),
        ("dirichlet", 20, {"alfa": 1}),
        ("iid", 20, {"scarce_clients": 21}),
        ("file", 20, {}),
        ("file", 20, {"path": "/nowhere.json"}),
    ],
)
def test_impossible_requests_are_refused_with_the_numbers(name, clients, changes, expect_error):
    with expect_error():
        check(settings_of(name, **changes), clients)
        make(name, clients, **changes)


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
    file = tmp_path / "clients.txt"
    file.write_text(text)
    part = make("file", clients=3, path=str(file), min_client_size=0)
    assert [part.train(k).tolist() for k in range(3)] == LISTS
    assert [part.test(k).tolist() for k in range(3)] == ([[10], [], [11]] if "test" in text else [[], [], []])


def test_a_dropped_client_of_a_file_is_not_evaluated_either(tmp_path):
    file = tmp_path / "clients.txt"
    file.write_text(json.dumps({"train": [[0, 1, 2], [3], [4, 5]], "test": [[10], [11, 12], [13]]}))
    part = make("file", clients=3, path=str(file), min_client_size=2, on_small="drop")
    assert [part.train(k).tolist() for k in range(3)] == [[0, 1, 2], [], [4, 5]]
    assert [part.test(k).tolist() for k in range(3)] == [[10], [], [13]]


@pytest.mark.parametrize(
    "text",
    [
        "[[0], [1]]",
        "[[0], [1], [1]]",
        "[[0], [1], [2000]]",
        "[[0], [1], [1999]]",
        "[[0], [1], [0.5]]",
        "[[0], [1], [true]]",
        "[[0], [1], [99999999999999999999]]",
        "[[0], [1], [[2]]]",
        "[" * 100_000,
        "{[1]: [2]}",
        "hello",
        '{"a": [1]}',
        '{"0": [0], "00": [1]}',
        '{"0": [0], "7": [1]}',
        "3",
    ],
)
def test_faulty_files_are_one_line(tmp_path, text, expect_error):
    file = tmp_path / "clients.txt"
    file.write_text(text)
    with expect_error():
        make("file", clients=3, path=str(file), data=data_of(test=10))


def test_published_partitions_are_used_as_they_are(tmp_path):
    file = tmp_path / "clients.json"
    file.write_text(json.dumps([[0], [], list(range(1, 50))]))
    assert make("file", clients=3, path=str(file)).sizes.tolist() == [1, 0, 49]


def test_what_is_moved_in_a_published_partition_is_counted_before_test_parts_are_held_out(tmp_path):
    file = tmp_path / "clients.json"
    file.write_text(json.dumps([[0, 1], list(range(2, 50))]))
    part = make("file", clients=2, path=str(file), min_client_size=8, test_fraction=0.25)
    assert part.sizes.tolist() == [6, 32]
    assert (part.small.clients, part.small.moved, part.small.dropped) == (1, 6, 0)


@pytest.mark.parametrize("changes", [{"test_fraction": 0.2}, {"scarce_clients": 3}, {"keep_fraction": 0.5}])
def test_sampled_refuses_what_it_would_ignore(changes, expect_error):
    with expect_error("partition"):
        make("sampled", **changes)
    with expect_error("partition"):
        make("sampled", merged=True)


def test_sampled_clients_have_the_counts_that_are_told(monkeypatch):
    monkeypatch.setattr("contrafed.partitions.partitioners.sampled.MAX_KEPT_CHUNKS", 2)
    data = data_with_a_gap()
    part = make("sampled", clients=600, data=data, examples_per_client=40, alpha=0.1)
    counts = part.class_counts()
    assert counts.shape == (600, 10)
    assert (counts.sum(1) == 40).all()
    assert not counts[:, 8:].any()
    for k in (0, 255, 256, 599, 1):
        assert np.bincount(data.y.numpy()[part.train(k)], minlength=10).tolist() == counts[k].tolist()


def test_a_million_sampled_clients_are_drawn_when_asked_for(monkeypatch):
    data = data_of()
    part = make("sampled", clients=1_000_000, data=data, examples_per_client=30, alpha=0.1)
    assert part.sizes.shape == (1_000_000,)
    assert part.sizes.strides == (0,)  # one number seen a million times
    examples = part.train(999_999)
    assert len(examples) == 30
    assert np.array_equal(
        examples, make("sampled", clients=1_000_000, data=data, examples_per_client=30, alpha=0.1).train(999_999)
    )
    assert not np.array_equal(examples, part.train(999_998))
    few = make("sampled", clients=5000, data=data, examples_per_client=2000, alpha=0.1)
    q = few.class_proportions()
    assert q.sum(1) == pytest.approx(np.ones(5000))
    for k in (0, 4500):
        drawn = np.bincount(data.y.numpy()[few.train(k)], minlength=10) / 2000
        assert drawn == pytest.approx(q[k], abs=0.05)


def test_sampled_clients_are_drawn_again_as_they_were(monkeypatch):
    monkeypatch.setattr("contrafed.partitions.partitioners.sampled.MAX_KEPT_EXAMPLES", 60)
    part = make("sampled", clients=9, examples_per_client=20)
    before = [part.train(client).copy() for client in range(9)]
    assert all(np.array_equal(part.train(client), before[client]) for client in (0, 8, 3, 3, 4))
    assert len(part._drawn) <= 3


def test_sampled_without_skew_has_the_balance_of_the_data():
    part = make("sampled", clients=5000)
    assert part.class_proportions()[17] == pytest.approx(np.full(10, 0.1))
    assert part.test(3).tolist() == []


def test_small_clients_error_move_and_drop(expect_error):
    tight = {"alpha": 0.05, "min_client_size": 60, "max_redraws": 2}
    with expect_error():
        make("dirichlet", on_small="error", **tight)
    moved = make("dirichlet", on_small="move", **tight)
    assert moved.sizes.min() >= 60
    assert moved.sizes.sum() == 2000
    drawn = make("dirichlet", **(tight | {"min_client_size": 0, "max_redraws": 0})).sizes
    once = make("dirichlet", on_small="move", **(tight | {"max_redraws": 0})).small
    assert (once.clients, once.moved, once.dropped) == ((drawn < 60).sum(), (60 - drawn).clip(0).sum(), 0)
    dropped = make("dirichlet", on_small="drop", **tight)
    assert ((dropped.sizes == 0) | (dropped.sizes >= 60)).all()
    assert (dropped.sizes == 0).any()
    assert (dropped.class_proportions()[dropped.sizes == 0] == 0).all()
    assert dropped.small == Small((dropped.sizes == 0).sum(), 0, 2000 - dropped.sizes.sum())
    assert make("iid").small == Small(0, 0, 0)


def test_moving_is_refused_when_nobody_has_enough(expect_error):
    with expect_error("partition.min_client_size"):
        make("lognormal", mean_size=10, min_client_size=50)
    owner = np.repeat(np.arange(40), 50)
    with expect_error("partition.min_client_size"):
        make("natural", data=data_of(owner=owner), min_client_size=60, on_small="move")


def test_natural_clients_get_nothing_that_others_wrote():
    owner = np.repeat([0, 1, 2], [1997, 2, 1])
    assert sorted(make("natural", clients=3, data=data_of(owner=owner)).sizes.tolist()) == [0, 0, 1997]


@pytest.mark.parametrize(("name", "each"), [("pathological", 2), ("lognormal", 3)])
def test_filled_up_clients_keep_their_class_limit(name, each):
    changes = {"pieces": "random"} if name == "pathological" else {"mean_size": 60, "sigma": 1.0}
    part = make(name, classes_per_client=each, min_client_size=30, max_redraws=0, **changes)
    assert part.sizes.min() >= 30
    assert ((part.class_counts() > 0).sum(1) <= each).all()


def test_dropping_needs_no_examples_for_everyone_but_keeps_someone(expect_error):
    few = make("dirichlet", clients=500, alpha=0.1, min_client_size=5, on_small="drop", max_redraws=1)
    assert ((few.sizes == 0) | (few.sizes >= 5)).all()
    assert 0 < (few.sizes > 0).sum() < 500
    with expect_error():
        make("iid", clients=500, min_client_size=10, on_small="drop")


@pytest.mark.parametrize(("on_small", "said"), [("move", "were moved to them"), ("drop", "they are left out, with")])
def test_a_run_reports_it_in_a_line_and_in_its_summary(tmp_path, capsys, on_small, said):
    tight = (
        "partition.alpha=0.05", "partition.min_client_size=60", "partition.max_redraws=0", f"partition.on_small={on_small}",
    )  # fmt: skip
    shape = ("engine=local", "num_clients=20", "num_rounds=1", "model=mlp", "strategy=fedavg")
    summary = run(config_of(*shape, *tight, f"output_dir={tmp_path}/run"))
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "min_client_size" in text]
    assert line.startswith(
        f"{summary['partition_small_clients']} clients had drawn fewer than partition.min_client_size=60 examples: "
    )
    assert said in line
    changed = summary["partition_small_moved" if on_small == "move" else "partition_small_dropped"]
    assert changed > 0
    assert str(changed) in line
    plain = run(config_of(*shape, "partition=iid", f"output_dir={tmp_path}/plain"))
    assert not any(key.startswith("partition_small") for key in plain)
    assert "min_client_size" not in capsys.readouterr().out


def test_a_run_says_which_clients_and_examples_are_left_out(tmp_path, capsys):
    (tmp_path / "split.json").write_text(json.dumps([list(range(50)), list(range(50, 100)), []]))
    shape = ("engine=local", "num_clients=3", "num_rounds=1", "model=mlp", "strategy=fedavg", "dataset.merge_splits=true")
    for name in ("partition.feature_shift.kind=noise", "attack=none"):
        file = ("partition=file", f"partition.path={tmp_path}/split.json", name)
        run(config_of(*shape, *file, f"output_dir={tmp_path}/{name[:9]}"))
        said = capsys.readouterr().out
        assert "1 of 3 clients have no training examples" in said
        assert "1697 training examples belong to no client" in said
    run(config_of(*shape, "partition=iid", f"output_dir={tmp_path}/iid"))
    said = capsys.readouterr().out
    assert "have no training examples" not in said
    assert "belong to no client" not in said


@pytest.mark.parametrize("flip", [(), ("attack=label_flip",), ("partition.feature_shift.kind=noise",)])
def test_a_run_says_which_share_of_its_examples_scarcity_left(tmp_path, capsys, flip):
    """Each class of a client keeps one example, so 0.05 of 27 examples of 10 classes is about a third."""
    shape = ("engine=local", "num_clients=50", "num_rounds=1", "model=mlp", "strategy=fedavg", "partition=iid")
    scarce = ("partition.keep_fraction=0.05", "partition.scarce_clients=2")
    run(config_of(*shape, *scarce, *flip, f"output_dir={tmp_path}/run"))
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("scarcity: ")]
    whole, kept = make_run_sizes(*shape), make_run_sizes(*shape, *scarce)
    assert 0.3 < kept[:48].sum() / whole[:48].sum() < 0.4
    for group in (slice(48), slice(48, None)):
        assert f" {kept[group].sum() / whole[group].sum():.3g} of their training examples" in line


def make_run_sizes(*overrides):
    return load_federation(resolve(config_of(*overrides)).client).partition.sizes
