"""Data sets of the Hugging Face hub by name, from a local folder, and the partitioners of flwr-datasets on our labels."""

import datasets
import numpy as np
import pytest
from helpers import check_overrides, config_of, with_images
from hydra.types import RunMode
from PIL import Image

from contrafed.config.compose import make_own_loader
from contrafed.config.run_config import resolve
from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.data.images import load_images
from contrafed.data.partition import make_partition
from contrafed.partitions.datasets import hub_sets
from contrafed.runs.setup import check_files


@pytest.fixture
def repository(tmp_path):
    """Return a folder with a hub repository's layout: 12 grey images of two named classes for training, 4 for testing."""

    def write(sizes=(9,), who=(0, 1, 2), kinds=("owl", "cat"), kind="string"):
        rng = np.random.default_rng(0)
        for split, count in (("train", 12), ("test", 4)):
            shapes = [sizes[i % len(sizes)] for i in range(count)]
            pictures = [Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)) for size in shapes]
            rows = {
                "picture": pictures,
                "kind": [kinds[i % len(kinds)] for i in range(count)],
                "who": [who[i % len(who)] for i in range(count)],
            }
            types = {"picture": datasets.Image(), "kind": datasets.Value(kind), "who": datasets.Value("int64")}
            features = datasets.Features(types)
            table = datasets.Dataset.from_dict(rows, features=features)
            table.to_parquet(str(tmp_path / "hub" / f"{split}-00000-of-00001.parquet"))
        return ("dataset=hub", f"dataset.repository={tmp_path / 'hub'}", f"dataset.root={tmp_path / 'cache'}")

    (tmp_path / "hub").mkdir()
    return write


COLUMNS = ("dataset.image_column=picture", "dataset.label_column=kind", "dataset.grayscale=true")


def load_images_of(*overrides):
    return load_images(choose("dataset", config_of(*overrides)["dataset"]))


def test_a_repository_is_read_by_its_columns_without_a_network(repository, monkeypatch):
    monkeypatch.setattr(hub_sets, "reachable", lambda url: pytest.fail("asked the network"))
    data = load_images_of(*repository(), *COLUMNS, "dataset.owner_column=who")
    assert tuple(data.x.shape) == (16, 1, 9, 9)
    assert data.y.tolist() == [1, 0] * 8  # cat before owl
    assert data.test.tolist() == [False] * 12 + [True] * 4
    assert data.owner.tolist() == [0, 1, 2] * 4 + [0, 1, 2, 0]


def test_a_folder_in_the_home_folder_is_one(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_images_of(*repository(), *COLUMNS, "dataset.repository=~/hub", "dataset.download=false").y) == 16


def test_a_finished_job_is_compared_by_the_content_of_its_folder(repository, tmp_path, expect_error):
    """A folder in place of a repository has no key ``path``."""
    job = check_overrides(*repository(), *COLUMNS)
    summary = {"data_fingerprint": load_images(job.client.dataset).fingerprint}
    check_files(job, tmp_path, summary, {})
    repository(kinds=("owl", "cat", "cat"))
    with expect_error():
        check_files(job, tmp_path, summary, {})
    check_files(check_overrides("dataset=digits"), tmp_path, summary, {})  # which cannot change, and are not loaded


def test_images_of_several_sizes_want_one(repository, expect_error):
    named = (*repository(sizes=(9, 12)), *COLUMNS, "dataset.test_split=null", "dataset.test_fraction=0.5")
    with expect_error("dataset.repository"):
        load_images_of(*named)
    data = load_images_of(*named, "dataset.image_size=10")
    assert tuple(data.x.shape) == (12, 1, 10, 10)
    assert int(data.test.sum()) == 6


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((1, 2, 3), "dataset.label_column=who: labels count from 0, found 1..3: dataset.classes=[...] numbers"),
        ((0, 7, 9999), "dataset.label_column=who: the largest label is 9999 though only 3 occur"),
    ],
)
def test_numbers_that_do_not_count_from_zero_want_classes(repository, labels, message):
    """Otherwise networks, partitions and probabilities would have classes without images."""
    named = (*repository(who=labels), "dataset.image_column=picture", "dataset.label_column=who")
    with pytest.raises(UserError) as error:
        load_images_of(*named)
    assert message in str(error.value)
    data = load_images_of(*named, f"dataset.classes=[{','.join(map(str, labels))}]")
    assert (data.num_classes, data.y[:4].tolist()) == (3, [0, 1, 2, 0])


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("string", ("owl", "cat", None)),
        ("string", ("owl", "cat", "")),
        ("string", ("owl", "cat", "NaN")),
        ("string", tuple("abcdefghijkl")),
        ("float32", (0.0, 1.0, float("nan"))),
        ("float32", (0.25, 1.0, -3.5)),
        ("int64", (0, 1, None)),
    ],
)
def test_labels_that_are_missing_or_no_classes_are_one_line(repository, monkeypatch, expect_error, kind, labels):
    monkeypatch.setattr("contrafed.data.labels.MIN_DISTINCT_LABELS", 5)
    with expect_error("dataset.label_column"):
        load_images_of(*repository(kinds=labels, kind=kind), *COLUMNS, "dataset.test_split=null")


def test_truth_values_are_two_classes_and_unlabelled_images_are_left_out_by_naming_classes(repository):
    data = load_images_of(*repository(kinds=(True, False, True), kind="bool"), *COLUMNS)
    assert (data.y[:4].tolist(), data.loaded.class_names) == ([1, 0, 1, 1], ("False", "True"))
    data = load_images_of(*repository(kinds=(3, None, 1), kind="int64"), *COLUMNS, "dataset.classes=[3,1]")
    assert data.y[:4].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("dataset.label_column=kid",), "unknown dataset.label_column 'kid', did you mean 'kind'? choices: kind, picture, who"),
        (("dataset.image_column=who",), "dataset.image_column=who holds int, no images"),
        (("dataset.owner_column=writer",), "unknown dataset.owner_column 'writer'"),
    ],
)
def test_a_wrong_column_is_a_line(repository, overrides, message):
    with pytest.raises(UserError) as error:
        load_images_of(*repository(), *COLUMNS, *overrides)
    assert message in str(error.value)


def dealt(partitioner, clients=4, seed=0, count=240, owner=None, **arguments):
    """Return a partitioner's parts of so many examples of six classes."""
    values = config_of("partition=flwr")["partition"] | {
        "partitioner": partitioner,
        "arguments": arguments,
        "min_client_size": 0,
    }
    data = with_images(np.zeros((count, 1, 8, 8), dtype=np.uint8), np.arange(count) % 6, owner=owner)
    partition = make_partition(choose("partition", values), data, clients, seed)
    return [partition.train(k) for k in range(clients)], data.y.numpy()


@pytest.mark.parametrize(
    ("partitioner", "arguments"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 2}),
        ("PathologicalPartitioner", {"num_classes_per_partition": 3, "class_assignment_mode": "deterministic"}),
        ("ShardPartitioner", {"num_shards_per_partition": 2}),
        ("LinearPartitioner", {}),
        ("SizePartitioner", {"partition_sizes": [10, 20, 30, 40]}),
        ("InnerDirichletPartitioner", {"partition_sizes": [60, 60, 60, 60], "alpha": 1.0}),
    ],
)
def test_a_partitioner_deals_out_our_examples_by_the_seed(partitioner, arguments):
    parts, _ = dealt(partitioner, **arguments)
    held = np.concatenate(parts)
    assert len(set(held.tolist())) == len(held) <= 240
    assert all(map(len, parts))
    again, _ = dealt(partitioner, **arguments)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    others, _ = dealt(partitioner, seed=1, **arguments)
    assert any(not np.array_equal(a, b) for a, b in zip(parts, others, strict=True))


@pytest.mark.parametrize(
    "named",
    [
        ["partition.arguments={alpha: 0.3, self_balancing: true}"],
        ["partition.arguments.alpha=0.3", "partition.arguments.self_balancing=true"],
    ],
)
def test_arguments_are_given_on_the_command_line(named):
    chosen = ("partition=flwr", "partition.partitioner=DirichletPartitioner", *named)
    config = config_of(*chosen)
    sweep = make_own_loader().load_configuration("config", [*chosen, "seed=0,1"], RunMode.MULTIRUN)
    assert sweep.partition.arguments == config["partition"]["arguments"]
    assert resolve(config).client.partition.config.arguments == {"alpha": 0.3, "self_balancing": True}


def test_what_a_partitioner_promises_holds_on_our_labels():
    parts, y = dealt("PathologicalPartitioner", num_classes_per_partition=2, class_assignment_mode="deterministic")
    assert [len(set(y[part])) for part in parts] == [2, 2, 2, 2]
    assert [len(part) for part in dealt("SizePartitioner", partition_sizes=[10, 20, 30, 40])[0]] == [10, 20, 30, 40]
    owner = np.arange(240) // 60
    parts, _ = dealt("NaturalIdPartitioner", owner=owner)
    assert sorted(tuple(set(owner[part])) for part in parts) == [(0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("partitioner", "more"),
    [
        ("DirichletPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 1, "min_partition_size": 99}),
        ("IidPartitioner", {"alpha": 1}),
        ("SizePartitioner", {"partition_sizes": [10, 20]}),
        ("DirichletPartitionr", {"alpha": 1}),
        ("NaturalIdPartitioner", {}),
    ],
)
def test_a_mistake_about_a_partitioner_is_a_line(partitioner, more, expect_error):
    with expect_error("partition.partitioner"):
        dealt(partitioner, **more)
