"""A user's images, as npz and as a folder: their conversion to tensors and one-line refusals."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import config_of
from PIL import Image

from contrafed.config.run_config import resolve
from contrafed.core.client_run import choose
from contrafed.data.images import check, load_images, make_images
from contrafed.data.own import facts_of, own_images


def settings_of(name, **changes):
    return choose("dataset", config_of(f"dataset={name}")["dataset"] | changes)


def npz(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return str(path)


GOOD_IMAGES = {"x": np.random.default_rng(0).integers(0, 256, (20, 8, 9, 3), dtype=np.uint8), "y": np.arange(20) % 4}


def test_npz_keeps_pixels_labels_and_split(tmp_path):
    rng = np.random.default_rng(0)
    x, split = rng.integers(0, 256, (20, 8, 9, 3), dtype=np.uint8), np.arange(20) // 4 % 2
    data = load_images(settings_of("npz", path=npz(tmp_path, x=x, y=GOOD_IMAGES["y"], split=split)))
    assert torch.equal(data.x[7, 2], torch.from_numpy(x[7, :, :, 2].copy()))
    assert data.y.tolist() == GOOD_IMAGES["y"].tolist()
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
    ("arrays", "changes"),
    [
        ({"x": GOOD_IMAGES["x"]}, {}),
        ({"y": GOOD_IMAGES["y"]}, {}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] - 1}, {}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] + 1}, {"num_classes": 4}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] * 10_000}, {}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] / 2}, {}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"][:, None]}, {}),
        ({**GOOD_IMAGES, "x": nan_pixel()}, {}),
        ({**GOOD_IMAGES, "x": np.full((20, 8, 8), 3.0)}, {}),
        ({**GOOD_IMAGES, "x": np.zeros((20, 8, 8), dtype=np.int32)}, {}),
        ({**GOOD_IMAGES, "x": np.zeros(20, dtype=np.uint8)}, {}),
        ({**GOOD_IMAGES, "x": np.zeros((20, 7, 8), dtype=np.uint8)}, {}),
        ({**GOOD_IMAGES, "x": np.zeros((20, 8, 8, 4), dtype=np.uint8)}, {}),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"][:19]}, {}),
        ({**GOOD_IMAGES, "split": np.full(20, 2)}, {}),
        ({**GOOD_IMAGES, "split": np.array(["train"] * 20)}, {}),
        ({**GOOD_IMAGES, "splits": np.zeros(20)}, {}),
        ({**GOOD_IMAGES, "owner": np.full(20, np.nan)}, {}),
        ({**GOOD_IMAGES, "split": np.zeros((20, 1))}, {}),
        ({**GOOD_IMAGES, "y": np.array(["cat", "dog"] * 10, dtype=object)}, {}),
        ({**GOOD_IMAGES, "owner": np.array(["Ann", "Bob"] * 10, dtype=object)}, {}),
        ({**GOOD_IMAGES, "split": np.zeros(19)}, {}),
        ({**GOOD_IMAGES, "split": np.ones(20)}, {}),
        ({"x": np.zeros((0, 8, 8), dtype=np.uint8), "y": np.zeros(0, dtype=int)}, {}),
        ({**GOOD_IMAGES, "y": np.zeros(20, dtype=int)}, {}),
    ],
)
def test_npz_faults_are_one_line(tmp_path, arrays, changes, expect_error):
    with expect_error() as error:
        load_images(settings_of("npz", path=npz(tmp_path, **arrays), **changes))
    assert "data.npz" in str(error.value)


def test_lists_and_tensors_are_images_too():
    x, y, test = GOOD_IMAGES["x"], GOOD_IMAGES["y"], np.arange(20) < 5
    expected = make_images(x, y, test, owner=y)
    for kind in (np.ndarray.tolist, torch.from_numpy):
        found = make_images(x, kind(y), kind(test), owner=kind(y))
        assert torch.equal(found.y, expected.y)
        assert torch.equal(found.test, expected.test)
        assert found.owner.tolist() == y.tolist()
    assert torch.equal(make_images(torch.from_numpy(x), y, test).x, expected.x)


@pytest.mark.parametrize(
    "changes",
    [{"x": GOOD_IMAGES["x"].tolist()}, {"x": [[1], [2, 3]]}, {"y": list("abcd" * 5)}, {"test": ["train"] * 20}, {"owner": 3}],
)
def test_lists_of_something_else_are_one_line(changes, expect_error):
    with expect_error():
        make_images(**{**GOOD_IMAGES, "test": np.zeros(20, dtype=bool), **changes})


def test_a_local_folder_that_is_no_set_of_the_hub_is_said_to_be_one(tmp_path, expect_error):
    (tmp_path / "notes.txt").write_text("nothing")
    with expect_error("dataset.repository"):
        load_images(settings_of("hub", repository=str(tmp_path), root=str(tmp_path / "cache")))


def test_files_that_are_no_npz(tmp_path, expect_error):
    (tmp_path / "text.npz").write_bytes(b"hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.save(tmp_path / "bare.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "damaged.npz", **GOOD_IMAGES)
    content = bytearray((tmp_path / "damaged.npz").read_bytes())
    content[60:90] = bytes(30)
    (tmp_path / "damaged.npz").write_bytes(content)
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object), y=np.arange(2))
    for name in ("text.npz", "empty.npz", "bare.npy", "damaged.npz", "", "objects.npz"):
        with expect_error():
            load_images(settings_of("npz", path=str(tmp_path / name)))


def test_paths_are_checked_before_anything_is_loaded(tmp_path, expect_error):
    for verb in (check, load_images):
        with expect_error("dataset"):
            verb(settings_of("npz"))
        with expect_error("dataset.path"):
            verb(settings_of("npz", path="/nowhere"))
    for name in ("mnist", "cinic10"):
        check(settings_of(name, root=str(tmp_path)))
        with expect_error("dataset"):
            check(settings_of(name, root=str(tmp_path), download=False))
    check(settings_of("npz", path=npz(tmp_path, x=np.zeros(1))))
    with expect_error("dataset.path"):
        check(settings_of("folder", path="/nowhere"))
    with expect_error("dataset.merge_splits"):
        check(settings_of("digits", merge_splits=3))
    with expect_error("dataset.roots"):
        check(settings_of("mnist", roots="x"))


def images_in(folder, colours):
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (12, 10), (colour, i, 0)).save(folder / name / f"{i}.png")


def test_an_image_of_more_than_eight_bits_is_refused_since_it_would_be_white(tmp_path, expect_error):
    for name, image in (("a", np.zeros((9, 9), dtype=np.uint8)), ("b", np.full((9, 9), 300, dtype=np.uint16))):
        (tmp_path / name).mkdir()
        Image.fromarray(image).save(tmp_path / name / "0.png")
    with expect_error():
        load_images(settings_of("folder", path=str(tmp_path)))


@pytest.mark.parametrize("parts", [("train", "val"), ("Train", "Test"), ("train",), ("test", "train", "valid")])
def test_parts_of_a_data_set_are_not_taken_for_classes(tmp_path, parts, expect_error):
    for part in parts:
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(2):
                Image.fromarray(np.full((9, 9, 3), 100 * k, dtype=np.uint8)).save(tmp_path / part / name / f"{k}.png")
    if {"train", "test"} <= {part.lower() for part in parts}:  # other folders are ignored
        assert load_images(settings_of("folder", path=str(tmp_path))).num_classes == 2
    else:
        with expect_error():
            load_images(settings_of("folder", path=str(tmp_path)))


def test_labels_count_from_zero(tmp_path, expect_error):
    path = npz(tmp_path, x=GOOD_IMAGES["x"], y=GOOD_IMAGES["y"] + 1)
    with expect_error():
        load_images(settings_of("npz", path=path))
    assert load_images(settings_of("npz", path=path, num_classes=5)).num_classes == 5


def test_folders(tmp_path, expect_error):
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
    images_in(tmp_path / "e" / "train", {"cat": 10, "dog": 200})
    (tmp_path / "b" / "cat" / "broken.png").write_bytes(b"no image")
    images_in(tmp_path / "d" / "train", {"cat": 10, "dog": 1})
    images_in(tmp_path / "d" / "test", {"emu": 200})
    for name in "cebd":
        with expect_error():
            load_images(settings_of("folder", path=str(tmp_path / name)))


def test_a_device_names_the_classes_of_its_file(tmp_path, expect_error):
    """A label would otherwise mean another class on another device."""
    x, paths = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), []
    for names in (["cat", "dog"], ["Dog", "cat"], ["cat", "dog", "owl", "yak"], [0, 1]):
        paths.append(tmp_path / f"{len(paths)}.npz")
        np.savez(paths[-1], x=x, y=np.array(names * (40 // len(names))))
    named = [load_images(settings_of("npz", path=str(path))).loaded.class_names for path in paths]
    assert named == [("cat", "dog"), ("Dog", "cat"), ("cat", "dog", "owl", "yak"), ()]
    own = (
        "dataset=own",
        "dataset.height=8",
        "dataset.width=8",
        "partition=own",
        "num_clients=2",
        "model=mlp",
        "strategy=fedavg",
    )
    for classes, fits in ((2, [0, 1, 3]), (3, [3])):
        run = resolve(config_of(*own, f"dataset.num_classes={classes}")).client
        run = replace(run, images=facts_of(load_images(run.dataset)))
        for number, path in enumerate(paths):
            with contextlib.nullcontext() if number in fits else expect_error(str(path)):
                data, _ = own_images(run, 0, str(path))
                assert data.num_classes == classes
                assert data.loaded.class_names == named[number]
