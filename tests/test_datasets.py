"""Data sets: their conversion to tensors, splits, and one-line refusals."""

import io
import json
import pickle
import shutil
import struct
import threading
import urllib.request
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError, URLError

import numpy as np
import pytest
import torch
from helpers import config_of
from PIL import Image

from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.data.images import check, image_deviations, load_images, make_images, stratified_split
from contrafed.partitions.datasets import hub_sets, network, torchvision_sets


def settings_of(name, **changes):
    return choose("dataset", config_of(f"dataset={name}")["dataset"] | changes)


def test_digits():
    data = load_images(settings_of("digits"))
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == torch.uint8
    assert data.x.max() == 255
    assert data.num_classes == 10
    for part in (data.test, ~data.test):
        share = torch.bincount(data.y[part]).double() / part.sum()
        assert share == pytest.approx(torch.full((10,), 0.1), abs=0.01)
    assert int(data.test.sum()) == pytest.approx(1797 / 4, abs=6)
    again = load_images(settings_of("digits"))
    assert torch.equal(data.test, again.test)
    train = data.x[~data.test].double() / 255
    assert data.mean[0] == pytest.approx(train.mean().item(), rel=1e-9)
    assert data.std[0] == pytest.approx(train.std(unbiased=False).item(), rel=1e-9)


def test_merged_splits_leave_no_central_test_set():
    assert not load_images(settings_of("digits", merge_splits=True)).test.any()
    assert load_images(settings_of("digits")).mean != (0.5,)
    half = load_images(settings_of("digits", normalize="half"))
    assert (half.mean, half.std) == ((0.5,), (0.5,))


def test_the_papers_deviation_is_the_mean_of_single_images(tmp_path, expect_error):
    """Training images (0, 102) and (0, 204) have standard deviations 0.2 and 0.4. All pixels together have 0.33."""
    assert image_deviations(images(102, 204)) == pytest.approx((0.3,), rel=1e-12)
    every, own = (load_images(settings_of("digits", normalize=way)) for way in ("moments", "image_deviations"))
    assert own.mean == every.mean
    assert own.std == image_deviations(own.x[~own.test])
    assert own.std < every.std
    with expect_error("dataset.normalize"):
        load_images(settings_of("own", normalize="image_deviations", num_classes=3))


def images(*highest):
    """Return grey images (N, 1, 8, 8) with half of the pixels 0, and the others at a given level."""
    x = torch.zeros(len(highest), 1, 8, 8, dtype=torch.uint8)
    for image, value in zip(x, highest, strict=True):
        image[:, ::2] = value
    return x


def idx(path, array):
    header = struct.pack(">HBB", 0, 8, array.ndim) + b"".join(struct.pack(">I", n) for n in array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + array.astype(np.uint8).tobytes())


def test_mnist_files_as_published(tmp_path):
    rng = np.random.default_rng(0)
    x, x_test = rng.integers(0, 256, (30, 28, 28)), rng.integers(0, 256, (10, 28, 28))
    raw = tmp_path / "MNIST" / "raw"
    idx(raw / "train-images-idx3-ubyte", x)
    idx(raw / "train-labels-idx1-ubyte", np.arange(30) % 10)
    idx(raw / "t10k-images-idx3-ubyte", x_test)
    idx(raw / "t10k-labels-idx1-ubyte", np.arange(10))
    data = load_images(settings_of("mnist", root=str(tmp_path), download=False))
    assert data.test.tolist() == [False] * 30 + [True] * 10
    assert np.array_equal(data.x[:30, 0].numpy(), x)
    assert data.y[30:].tolist() == list(range(10))


def test_a_damaged_file_is_one_line(tmp_path, expect_error):
    raw = tmp_path / "MNIST" / "raw"
    for part in ("train", "t10k"):
        idx(raw / f"{part}-images-idx3-ubyte", np.zeros((4, 28, 28)))
        idx(raw / f"{part}-labels-idx1-ubyte", np.arange(4))
    (raw / "train-images-idx3-ubyte").write_bytes((raw / "train-images-idx3-ubyte").read_bytes()[:100])
    with expect_error("dataset"):
        load_images(settings_of("mnist", root=str(tmp_path)))


def test_emnist_letters_stand_upright(tmp_path):
    x = (np.arange(28 * 28).reshape(1, 28, 28) + np.arange(10)[:, None, None]) % 256
    raw = tmp_path / "EMNIST" / "raw"
    for part in ("train", "test"):
        idx(raw / f"emnist-balanced-{part}-images-idx3-ubyte", x)
        idx(raw / f"emnist-balanced-{part}-labels-idx1-ubyte", np.arange(10))
    data = load_images(settings_of("emnist", root=str(tmp_path), download=False))
    assert np.array_equal(data.x[0, 0].numpy(), x[0].T)


def test_cifar_batches_as_published(tmp_path, monkeypatch):
    from torchvision import datasets

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": list(range(10))}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a: True)
    data = load_images(settings_of("cifar10", root=str(tmp_path), download=False))
    assert data.x.shape == (60, 3, 32, 32)
    assert np.array_equal(data.x[0].numpy(), rows[0].reshape(3, 32, 32))
    assert int(data.test.sum()) == 10


def test_svhn_channels():
    class Part:
        data = np.zeros((2, 3, 32, 31), dtype=np.uint8)
        labels = np.array([0, 9])

    x, y = torchvision_sets.arrays(Part, "svhn")
    assert x.shape == (2, 32, 31, 3)
    assert y.tolist() == [0, 9]


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar10", "svhn"])
def test_missing_data_say_what_to_put_where(tmp_path, name, expect_error):
    with expect_error("dataset"):
        load_images(settings_of(name, root=str(tmp_path), download=False))


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, capfd, expect_error):
    def offline(*args, **kwargs):
        print("a library's chatter")
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", offline)
    monkeypatch.setattr(torchvision_sets, "reachable", lambda url: True)
    with expect_error("dataset"):
        load_images(settings_of("mnist", root=str(tmp_path)))
    assert "chatter" not in capfd.readouterr().out


@pytest.mark.parametrize("name", sorted(torchvision_sets.SETS))
def test_without_a_network_no_download_begins(tmp_path, monkeypatch, name, expect_error):
    asked = []
    monkeypatch.setattr(torchvision_sets, "reachable", asked.append)
    with expect_error("dataset"):
        load_images(settings_of(name, root=str(tmp_path)))
    assert asked
    assert all(url.startswith("http") for url in asked)


def test_a_server_that_refuses_is_reachable_and_one_that_is_not_there_is_not(monkeypatch):
    def refuses(request, timeout):
        raise HTTPError(request.full_url, 403, "forbidden", Message(), None)

    def is_not_there(request, timeout):
        raise URLError("no such host")

    monkeypatch.setattr(urllib.request, "urlopen", refuses)
    assert network.reachable("https://example.invalid/")
    monkeypatch.setattr(urllib.request, "urlopen", is_not_there)
    assert not network.reachable("https://example.invalid/")


def test_a_silent_server_is_given_up(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: release.wait() and io.BytesIO())
    monkeypatch.setattr(network, "MAX_ANSWER_SECONDS", 0.01)
    assert not network.reachable("https://example.invalid/")
    release.set()


@pytest.mark.parametrize("name", ["cinic10", "femnist", "tiny_imagenet"])
def test_the_hub_without_a_network_is_one_line(tmp_path, monkeypatch, capfd, name, expect_error):
    monkeypatch.setattr(hub_sets, "reachable", lambda url: False)
    with expect_error("dataset"):
        load_images(settings_of(name, root=str(tmp_path)))
    assert capfd.readouterr() == ("", "")


def cache_table(root, repository, rows_of_split, features, tmp_path):
    """Write tables to the cache of the hub's client."""
    import datasets

    files = {}
    for split, rows in rows_of_split.items():
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_dict(rows, features=features).to_parquet(files[split])
    builder = datasets.load_dataset_builder("parquet", data_files=files, cache_dir=str(tmp_path / "built"))
    builder.download_and_prepare()
    name = repository.split("/")[1]
    folder = root / "hub" / repository.replace("/", "___") / "default" / "0.0.0" / "abc"
    folder.mkdir(parents=True)
    for split in files:
        shutil.copy(Path(builder.cache_dir) / f"parquet-{split}.arrow", folder / f"{name}-{split}.arrow")
    info = json.loads((Path(builder.cache_dir) / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": name, "config_name": "default"}))


def test_a_cached_hub_set_is_read_without_asking_the_hub(tmp_path, monkeypatch, capfd):
    import datasets
    from huggingface_hub import constants

    def refuse_request(url):
        raise AssertionError(f"asked {url}")

    pictures = [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = {
        "train": {"image": pictures[:9], "label": [i % 3 for i in range(9)]},
        "valid": {"image": pictures[9:], "label": [0, 1, 2]},
    }
    cache_table(tmp_path / "root", "zh-plus/tiny-imagenet", rows, features, tmp_path)
    capfd.readouterr()
    monkeypatch.setattr(hub_sets, "reachable", refuse_request)
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    settings = settings_of("tiny_imagenet", root=str(tmp_path / "root"), download=False)
    check(settings)
    data = load_images(settings)
    assert data.x.shape == (12, 3, 64, 64)
    assert data.x[:, 0, 0, 0].tolist() == list(range(12))
    assert data.test.tolist() == [False] * 9 + [True] * 3
    assert capfd.readouterr() == ("", "")
    assert before == (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE)


def test_writers_own_their_characters():
    import datasets

    config = settings_of("femnist").config
    table = datasets.Dataset.from_dict(
        {
            "image": [Image.new("L", (28, 28), i) for i in range(40)],
            "character": [i % 3 for i in range(40)],
            "writer_id": [f"w{i % 5}" for i in range(40)],
        },
        features=datasets.Features(
            {"image": datasets.Image(), "character": datasets.Value("int64"), "writer_id": datasets.Value("string")}
        ),
    )
    data = hub_sets.images(config, [table])
    assert data.x.shape == (40, 1, 28, 28)
    assert data.x[7].unique().tolist() == [7]
    assert data.owner.tolist() == [i % 5 for i in range(40)]
    assert 0 < int(data.test.sum()) < 10


def test_only_some_of_the_published_classes_are_read(expect_error):
    """Classes are numbered anew in the given order. Writers of none of them are not clients."""
    import datasets

    rows = {
        "image": [Image.new("L", (28, 28), i) for i in range(40)],
        "character": [[36, 7, 45, 38][i % 4] for i in range(40)],
        "writer_id": [f"w{i % 4 if i % 4 != 1 else 9}" for i in range(40)],
    }
    table = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data = hub_sets.images(settings_of("femnist", classes=[45, 36]).config, [table])
    assert data.num_classes == 2
    assert data.x[:, 0, 0, 0].tolist() == [i for i in range(40) if i % 4 in (0, 2)]
    assert data.y.tolist() == [1, 0] * 10
    assert data.owner.tolist() == [0, 1] * 10
    for wrong in ([36, 40], [36, 36]):
        with expect_error("dataset.classes"):
            hub_sets.images(settings_of("femnist", classes=wrong).config, [table])


def test_stratified_split_takes_the_fraction_of_every_class():
    y = np.repeat([0, 1, 2], [40, 20, 4])
    test = stratified_split(y, 0.25, 0)
    assert np.bincount(y[test]).tolist() == [10, 5, 1]
    assert stratified_split(np.array([0, 1, 1]), 0.9, 0).sum() == 1, "each class keeps one example to train on"


def test_a_split_may_be_marked_by_numbers():
    x, marks = np.arange(4, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2), np.array([0, 0, 1, 1])
    data = make_images(x, np.array([0, 1, 0, 1]), marks)
    assert data.mean == (pytest.approx(0.5 / 255),)
    assert data.test.tolist() == [False, False, True, True]


def test_a_constant_channel_does_not_divide_by_zero():
    data = make_images(np.full((4, 8, 8), 7, dtype=np.uint8), np.array([0, 1, 0, 1]), np.zeros(4, dtype=bool))
    assert data.std[0] > 0


@pytest.mark.parametrize(("owners", "message"), [(3, "4 images and 3 owners"), (None, None)])
def test_owners_are_one_per_image(owners, message):
    arrays = np.zeros((4, 8, 8), dtype=np.uint8), np.array([0, 1, 0, 1]), np.zeros(4, dtype=bool)
    if message is None:
        assert make_images(*arrays).owner is None
    else:
        with pytest.raises(UserError, match=message):
            make_images(*arrays, owner=np.zeros(owners, dtype=int))


def test_a_share_of_generated_data_is_said_to_have_no_effect():
    found = ([], ["dataset.fraction=0.1"])
    whole, part = (load_images(choose("dataset", config_of("dataset=uci_har", *more)["dataset"])) for more in found)
    assert len(part.y) == len(whole.y)
    assert not whole.warnings
    assert any("dataset.fraction" in line for line in part.warnings)
