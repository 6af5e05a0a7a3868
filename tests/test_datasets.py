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
from PIL import Image
from rig import config_of

from core.errors import UserError
from core.run import choose
from partitions.datasets import hub_sets, network, torchvision_sets
from partitions.images import check, load_images, make_images, stratified_split


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


def npz(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return str(path)


GOOD = {"x": np.zeros((20, 8, 9, 3), dtype=np.uint8), "y": np.arange(20) % 4}


def test_npz_keeps_pixels_labels_and_split(tmp_path):
    rng = np.random.default_rng(0)
    x, split = rng.integers(0, 256, (20, 8, 9, 3), dtype=np.uint8), np.arange(20) % 2
    data = load_images(settings_of("npz", path=npz(tmp_path, x=x, y=GOOD["y"], split=split)))
    assert torch.equal(data.x[7, 2], torch.from_numpy(x[7, :, :, 2].copy()))
    assert data.y.tolist() == GOOD["y"].tolist()
    assert data.test.tolist() == split.astype(bool).tolist()
    assert data.num_classes == 4


def test_npz_floats_are_rounded_to_bytes_and_grey_gets_a_channel(tmp_path):
    x = np.linspace(0, 1, 10 * 64, dtype=np.float32).reshape(10, 8, 8)
    data = load_images(settings_of("npz", path=npz(tmp_path, x=x, y=np.arange(10) % 2)))
    assert data.x.shape == (10, 1, 8, 8)
    assert np.abs(data.x[:, 0].numpy() / 255 - x).max() <= 0.5 / 255 + 1e-6


def nan_pixel():
    x = np.zeros((20, 8, 8), dtype=np.float32)
    x[3, 1, 1] = np.nan
    return x


@pytest.mark.parametrize(
    ("arrays", "changes", "message"),
    [
        ({"x": GOOD["x"]}, {}, "has no array 'y'; it holds: x"),
        ({"y": GOOD["y"]}, {}, "has no array 'x'; it holds: y"),
        ({**GOOD, "y": GOOD["y"] - 1}, {}, r"labels must be in 0\.\.2, found -1\.\.2"),
        ({**GOOD, "y": GOOD["y"] + 1}, {"num_classes": 4}, r"labels must be in 0\.\.3, found 1\.\.4"),
        ({**GOOD, "y": GOOD["y"] * 10_000}, {}, "largest label is 30000 though only 4 occur"),
        ({**GOOD, "y": GOOD["y"] / 2}, {}, "labels y must be whole numbers"),
        ({**GOOD, "y": GOOD["y"][:, None]}, {}, "labels y must be whole numbers"),
        ({**GOOD, "x": nan_pixel()}, {}, "1 pixels of x are NaN or infinite"),
        ({**GOOD, "x": np.full((20, 8, 8), 3.0)}, {}, r"must be in \[0, 1\], found 3\.\.3"),
        ({**GOOD, "x": np.zeros((20, 8, 8), dtype=np.int32)}, {}, "x must be uint8, or float"),
        ({**GOOD, "x": np.zeros((20, 8), dtype=np.uint8)}, {}, r"must be uint8 \(N,H,W\)"),
        ({**GOOD, "x": np.zeros((20, 7, 8), dtype=np.uint8)}, {}, "at least 8x8 .* got 7x8 with 1"),
        ({**GOOD, "x": np.zeros((20, 8, 8, 4), dtype=np.uint8)}, {}, "got 8x8 with 4"),
        ({**GOOD, "y": GOOD["y"][:19]}, {}, "20 images, 19 labels"),
        ({**GOOD, "split": np.full(20, 2)}, {}, r"split must be 0 \(train\) or 1 \(test\), found \[2\]"),
        ({**GOOD, "split": np.array(["train"] * 20)}, {}, r"split must be 0 \(train\) or 1 \(test\), found \['train'\]"),
        ({**GOOD, "split": np.zeros((20, 1))}, {}, r"one mark per image \(N,\), got \(20, 1\)"),
        ({**GOOD, "split": np.zeros(19)}, {}, "20 images, 20 labels and 19 split marks"),
        ({**GOOD, "split": np.ones(20)}, {}, "training split is empty"),
        ({"x": np.zeros((0, 8, 8), dtype=np.uint8), "y": np.zeros(0, dtype=int)}, {}, "training split is empty"),
        ({**GOOD, "y": np.zeros(20, dtype=int)}, {}, "at least 2 classes, found 1"),
    ],
)
def test_npz_faults_are_one_line(tmp_path, arrays, changes, message):
    with pytest.raises(UserError, match=message) as error:
        load_images(settings_of("npz", path=npz(tmp_path, **arrays), **changes))
    assert "\n" not in str(error.value)
    assert "data.npz" in str(error.value)


def test_files_that_are_no_npz(tmp_path):
    for name, content in (("text.npz", b"hello"), ("empty.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="no readable npz file"):
            load_images(settings_of("npz", path=str(tmp_path / name)))
    np.save(tmp_path / "bare.npy", np.zeros(3))
    with pytest.raises(UserError, match="no readable npz file"):
        load_images(settings_of("npz", path=str(tmp_path / "bare.npy")))
    np.savez_compressed(tmp_path / "damaged.npz", **GOOD)
    content = bytearray((tmp_path / "damaged.npz").read_bytes())
    content[60:90] = bytes(30)
    (tmp_path / "damaged.npz").write_bytes(content)
    with pytest.raises(UserError, match="no readable npz file"):
        load_images(settings_of("npz", path=str(tmp_path / "damaged.npz")))
    with pytest.raises(UserError, match="no readable npz file"):
        load_images(settings_of("npz", path=str(tmp_path)))
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))
    with pytest.raises(UserError, match="no readable npz file"):
        load_images(settings_of("npz", path=str(tmp_path / "objects.npz")))


def test_paths_are_checked_before_anything_is_loaded(tmp_path):
    for verb in (check, load_images):
        with pytest.raises(UserError, match="dataset=npz needs dataset.path"):
            verb(settings_of("npz"))
        with pytest.raises(UserError, match="nothing at /nowhere"):
            verb(settings_of("npz", path="/nowhere"))
    for name in ("mnist", "cinic10"):
        check(settings_of(name, root=str(tmp_path)))
        with pytest.raises(UserError, match=f"dataset={name}: not found"):
            check(settings_of(name, root=str(tmp_path), download=False))
    check(settings_of("npz", path=npz(tmp_path, x=np.zeros(1))))
    with pytest.raises(UserError, match="nothing at /nowhere"):
        check(settings_of("folder", path="/nowhere"))
    with pytest.raises(UserError, match="merge_splits must be true or false"):
        check(settings_of("digits", merge_splits=3))
    with pytest.raises(UserError, match="did you mean 'root'"):
        check(settings_of("mnist", roots="x"))


def images_in(folder, colours):
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (12, 10), (colour, i, 0)).save(folder / name / f"{i}.png")


def test_folders(tmp_path):
    images_in(tmp_path / "a" / "train", {"cat": 10, "dog": 200})
    images_in(tmp_path / "a" / "test", {"dog": 200})
    data = load_images(settings_of("folder", path=str(tmp_path / "a"), image_size=16))
    assert data.x.shape == (12, 3, 16, 16)
    assert data.test.tolist() == [False] * 8 + [True] * 4
    assert data.y[data.test].tolist() == [1] * 4
    assert set(data.x[data.y == 1, 0].flatten().tolist()) == {200}
    images_in(tmp_path / "b", {"cat": 10, "dog": 200})
    plain = load_images(settings_of("folder", path=str(tmp_path / "b"), grayscale=True))
    assert plain.x.shape == (8, 1, 32, 32)
    assert int(plain.test.sum()) == 2
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="no folder of class folders"):
        load_images(settings_of("folder", path=str(tmp_path / "c")))
    images_in(tmp_path / "e" / "train", {"cat": 10, "dog": 200})
    with pytest.raises(UserError, match="has a folder train alone"):
        load_images(settings_of("folder", path=str(tmp_path / "e")))
    (tmp_path / "b" / "cat" / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="an image cannot be read"):
        load_images(settings_of("folder", path=str(tmp_path / "b")))
    images_in(tmp_path / "d" / "train", {"cat": 10, "dog": 1})
    images_in(tmp_path / "d" / "test", {"emu": 200})
    with pytest.raises(UserError, match="class 'emu' is in test but not in train"):
        load_images(settings_of("folder", path=str(tmp_path / "d")))


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


def test_a_damaged_file_is_one_line(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    for part in ("train", "t10k"):
        idx(raw / f"{part}-images-idx3-ubyte", np.zeros((4, 28, 28)))
        idx(raw / f"{part}-labels-idx1-ubyte", np.arange(4))
    (raw / "train-images-idx3-ubyte").write_bytes((raw / "train-images-idx3-ubyte").read_bytes()[:100])
    with pytest.raises(UserError, match="MNIST/raw in .* cannot be read") as error:
        load_images(settings_of("mnist", root=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_emnist_letters_stand_upright(tmp_path):
    x = np.arange(28 * 28).reshape(1, 28, 28).repeat(10, 0) % 256
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
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (10, 3072), dtype=np.uint8)
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
def test_missing_data_say_what_to_put_where(tmp_path, name):
    with pytest.raises(UserError, match=f"put .* into {tmp_path}, or set dataset.download=true"):
        load_images(settings_of(name, root=str(tmp_path), download=False))


def test_a_failed_download_is_one_line(tmp_path, monkeypatch, capfd):
    def offline(*args, **kwargs):
        print("a library's chatter")
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", offline)
    monkeypatch.setattr(torchvision_sets, "reachable", lambda url: True)
    with pytest.raises(UserError, match="the download failed .*; put MNIST/raw into") as error:
        load_images(settings_of("mnist", root=str(tmp_path)))
    assert "\n" not in str(error.value)
    assert "chatter" not in capfd.readouterr().out


@pytest.mark.parametrize("name", sorted(torchvision_sets.PLACES))
def test_without_a_network_no_download_begins(tmp_path, monkeypatch, name):
    asked = []
    monkeypatch.setattr(torchvision_sets, "reachable", asked.append)
    with pytest.raises(UserError, match=f"dataset={name}: not found .* no network .* put .* into {tmp_path}") as error:
        load_images(settings_of(name, root=str(tmp_path)))
    assert "\n" not in str(error.value)
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
    monkeypatch.setattr(network, "PATIENCE", 0.01)
    assert not network.reachable("https://example.invalid/")
    release.set()


@pytest.mark.parametrize("name", ["cinic10", "femnist", "tiny_imagenet"])
def test_the_hub_without_a_network_is_one_line(tmp_path, monkeypatch, capfd, name):
    monkeypatch.setattr(hub_sets, "reachable", lambda url: False)
    with pytest.raises(
        UserError, match=f"dataset={name}: not found, and no network to download it; .* into {tmp_path}"
    ) as error:
        load_images(settings_of(name, root=str(tmp_path)))
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def cache_table(root, repository, rows_of_split, features, tmp_path):
    """Put tables where the hub's client keeps what it downloaded."""
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

    def asked(url):
        raise AssertionError(f"asked {url}")

    pictures = [Image.new("RGB", (64, 64), (i, 0, 0)) for i in range(12)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
    rows = {
        "train": {"image": pictures[:9], "label": [i % 3 for i in range(9)]},
        "valid": {"image": pictures[9:], "label": [0, 1, 2]},
    }
    cache_table(tmp_path / "root", "zh-plus/tiny-imagenet", rows, features, tmp_path)
    capfd.readouterr()
    monkeypatch.setattr(hub_sets, "reachable", asked)
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


def test_stratified_split_takes_the_fraction_of_every_class():
    y = np.repeat([0, 1, 2], [40, 20, 4])
    test = stratified_split(y, 0.25, 0)
    assert np.bincount(y[test]).tolist() == [10, 5, 1]
    assert stratified_split(np.array([0, 1, 1]), 0.9, 0).sum() == 1, "each class keeps one example to train on"


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
