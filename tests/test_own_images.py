"""A user's images, as npz and as a folder: their conversion to tensors and one-line refusals."""

import numpy as np
import pytest
import torch
from helpers import config_of
from PIL import Image

from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.data.images import check, load_images, make_images


def settings_of(name, **changes):
    return choose("dataset", config_of(f"dataset={name}")["dataset"] | changes)


def npz(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return str(path)


GOOD_IMAGES = {"x": np.zeros((20, 8, 9, 3), dtype=np.uint8), "y": np.arange(20) % 4}


def test_npz_keeps_pixels_labels_and_split(tmp_path):
    rng = np.random.default_rng(0)
    x, split = rng.integers(0, 256, (20, 8, 9, 3), dtype=np.uint8), np.arange(20) % 2
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
    ("arrays", "changes", "message"),
    [
        ({"x": GOOD_IMAGES["x"]}, {}, "has no array 'y'; it holds: x"),
        ({"y": GOOD_IMAGES["y"]}, {}, "has no array 'x'; it holds: y"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] - 1}, {}, r"labels must be in 0\.\.2, found -1\.\.2"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] + 1}, {"num_classes": 4}, r"labels must be in 0\.\.3, found 1\.\.4"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] * 10_000}, {}, "largest label is 30000 though only 4 occur"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"] / 2}, {}, "labels y must be whole numbers"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"][:, None]}, {}, "labels y must be whole numbers"),
        ({**GOOD_IMAGES, "x": nan_pixel()}, {}, "1 pixels of x are NaN or infinite"),
        ({**GOOD_IMAGES, "x": np.full((20, 8, 8), 3.0)}, {}, r"must be in \[0, 1\], found 3\.\.3"),
        ({**GOOD_IMAGES, "x": np.zeros((20, 8, 8), dtype=np.int32)}, {}, "x must be uint8, or float"),
        ({**GOOD_IMAGES, "x": np.zeros((20, 8), dtype=np.uint8)}, {}, r"must be uint8 \(N,H,W\)"),
        ({**GOOD_IMAGES, "x": np.zeros((20, 7, 8), dtype=np.uint8)}, {}, "at least 8x8 .* got 7x8 with 1"),
        ({**GOOD_IMAGES, "x": np.zeros((20, 8, 8, 4), dtype=np.uint8)}, {}, "got 8x8 with 4"),
        ({**GOOD_IMAGES, "y": GOOD_IMAGES["y"][:19]}, {}, "20 images, 19 labels"),
        ({**GOOD_IMAGES, "split": np.full(20, 2)}, {}, r"split must be 0 \(train\) or 1 \(test\), found \[2\]"),
        ({**GOOD_IMAGES, "split": np.array(["train"] * 20)}, {}, r"split must be 0 \(train\) or 1 \(test\), found \['train'\]"),
        ({**GOOD_IMAGES, "splits": np.zeros(20)}, {}, "unknown array 'splits', did you mean 'split'"),
        ({**GOOD_IMAGES, "names": np.zeros(4)}, {}, "unknown array 'names'; choices: split, x, y"),
        ({**GOOD_IMAGES, "split": np.zeros((20, 1))}, {}, r"one mark per image \(N,\), got \(20, 1\)"),
        ({**GOOD_IMAGES, "split": np.zeros(19)}, {}, "20 images, 20 labels and 19 split marks"),
        ({**GOOD_IMAGES, "split": np.ones(20)}, {}, "training split is empty"),
        ({"x": np.zeros((0, 8, 8), dtype=np.uint8), "y": np.zeros(0, dtype=int)}, {}, "training split is empty"),
        ({**GOOD_IMAGES, "y": np.zeros(20, dtype=int)}, {}, "at least 2 classes, found 1"),
    ],
)
def test_npz_faults_are_one_line(tmp_path, arrays, changes, message):
    with pytest.raises(UserError, match=message) as error:
        load_images(settings_of("npz", path=npz(tmp_path, **arrays), **changes))
    assert "\n" not in str(error.value)
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
    ("changes", "message"),
    [
        ({"x": GOOD_IMAGES["x"].tolist()}, "images must be uint8 .* got int64"),
        ({"x": [[1], [2, 3]]}, "images, labels, split and owners must be arrays: .*inhomogeneous"),
        ({"y": list("abcd" * 5)}, r"labels y must be whole numbers \(N,\), got <U1"),
        ({"test": ["train"] * 20}, "the split must be True where an image is for testing, got <U5"),
        ({"owner": 3}, r"20 images and \(\) owners do not match"),
    ],
)
def test_lists_of_something_else_are_one_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        make_images(**{**GOOD_IMAGES, "test": np.zeros(20, dtype=bool), **changes})
    assert "\n" not in str(error.value)


def test_a_local_folder_that_is_no_set_of_the_hub_is_said_to_be_one(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(UserError, match=r"^dataset\.repository: the folder .* cannot be read: "):
        load_images(settings_of("hub", repository=str(tmp_path), root=str(tmp_path / "cache")))


def test_files_that_are_no_npz(tmp_path):
    for name, content in (("text.npz", b"hello"), ("empty.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="no readable npz file but something else"):
            load_images(settings_of("npz", path=str(tmp_path / name)))
    np.save(tmp_path / "bare.npy", np.zeros(3))
    with pytest.raises(UserError, match="no readable npz file"):
        load_images(settings_of("npz", path=str(tmp_path / "bare.npy")))
    np.savez_compressed(tmp_path / "damaged.npz", **GOOD_IMAGES)
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


def test_an_image_of_more_than_eight_bits_is_refused_since_it_would_be_white(tmp_path):
    for name, image in (("a", np.zeros((9, 9), dtype=np.uint8)), ("b", np.full((9, 9), 300, dtype=np.uint16))):
        (tmp_path / name).mkdir()
        Image.fromarray(image).save(tmp_path / name / "0.png")
    with pytest.raises(UserError, match=r"b/0.png: an image has more than 8 bits a channel; save it with 8"):
        load_images(settings_of("folder", path=str(tmp_path)))


@pytest.mark.parametrize("parts", [("train", "val"), ("Train", "Test"), ("train",), ("test", "train", "valid")])
def test_parts_of_a_data_set_are_not_taken_for_classes(tmp_path, parts):
    for part in parts:
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            for k in range(2):
                Image.fromarray(np.zeros((9, 9, 3), dtype=np.uint8)).save(tmp_path / part / name / f"{k}.png")
    if {"train", "test"} <= set(parts):  # other folders are ignored
        assert load_images(settings_of("folder", path=str(tmp_path))).num_classes == 2
    else:
        with pytest.raises(UserError, match="there must be train and test, or the classes themselves"):
            load_images(settings_of("folder", path=str(tmp_path)))


def test_labels_count_from_zero(tmp_path):
    path = npz(tmp_path, x=GOOD_IMAGES["x"], y=GOOD_IMAGES["y"] + 1)
    with pytest.raises(UserError, match="labels count from 0, found 1..4: number them anew, or set dataset.num_classes"):
        load_images(settings_of("npz", path=path))
    assert load_images(settings_of("npz", path=path, num_classes=5)).num_classes == 5


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
    with pytest.raises(UserError, match="has train; there must be train and test"):
        load_images(settings_of("folder", path=str(tmp_path / "e")))
    (tmp_path / "b" / "cat" / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="broken.png: an image cannot be read"):
        load_images(settings_of("folder", path=str(tmp_path / "b")))
    images_in(tmp_path / "d" / "train", {"cat": 10, "dog": 1})
    images_in(tmp_path / "d" / "test", {"emu": 200})
    with pytest.raises(UserError, match="class 'emu' is in test but not in train"):
        load_images(settings_of("folder", path=str(tmp_path / "d")))
