"""What was loaded is told in one line, and images and labels that cannot be what was meant are refused or warned of."""

import json

import numpy as np
import pytest
from helpers import config_of
from PIL import Image

from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.data.images import load_images
from contrafed.data.loaded import describe_loaded
from contrafed.runs.run import run

RNG = np.random.default_rng(0)


def write_images(folder, classes, count=6, ending="png", mode="L"):
    """Write random images below ``folder/CLASS``."""
    channels = {"L": (), "RGBA": (4,)}[mode]
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            Image.fromarray(RNG.integers(0, 256, (10, 10, *channels), dtype=np.uint8)).save(folder / name / f"{i}.{ending}")


def load(source, path, **changes):
    asked = {f"dataset.{key}": value for key, value in changes.items()} | (
        {"dataset.image_size": 8} if source == "folder" else {}
    )
    config = config_of(f"dataset={source}", f"dataset.path={path}", *(f"{key}={value}" for key, value in asked.items()))
    return load_images(choose("dataset", config["dataset"]))


def save(path, x=None, y=None, **others):
    x = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8) if x is None else x
    np.savez(path, x=x, y=np.arange(len(x)) % 4 if y is None else y, **others)
    return path


def test_one_line_says_what_was_loaded(tmp_path):
    write_images(tmp_path, ["cat", "dog"])
    (tmp_path / "cat" / "note.txt").write_text("no image")
    (tmp_path / "cat" / ".DS_Store").write_text("hidden")
    write_images(tmp_path / ".ipynb_checkpoints", ["x"])
    data = load("folder", tmp_path, test_fraction=0.34)
    assert describe_loaded(data) == "12 images 8x8x3, 2 classes (cat, dog), 8 train, 4 test; 1 files skipped: .txt"
    assert data.warnings == ()


def test_a_runs_summary_has_the_account(tmp_path, capsys):
    save(tmp_path / "a.npz")
    settings = ("model=mlp", "engine=local", "tracker=none", "num_clients=2", "num_rounds=1", "partition=iid")
    run(config_of(*settings, "dataset=npz", f"dataset.path={tmp_path}/a.npz", f"output_dir={tmp_path}/run"))
    account = json.loads((tmp_path / "run" / "summary.json").read_text())["data"]
    assert (account["images"], account["shape"], account["classes"]) == (40, [8, 8, 1], 4)
    assert sum(account["train_by_class"]) + sum(account["test_by_class"]) == 40
    assert "40 images 8x8x1" in capsys.readouterr().out


@pytest.mark.parametrize("splits", [("training_set", "test_set"), ("Train_Images", "val-data"), ("train", "val"), ("dev",)])
def test_folders_of_splits_are_no_classes(tmp_path, splits):
    for split in splits:
        write_images(tmp_path / split, ["a", "b"])
    with pytest.raises(UserError, match="Fix: "):
        load("folder", tmp_path)


def test_train_test_and_val_are_read(tmp_path):
    for split, count in (("Training", 4), ("test", 2), ("valid", 3)):
        write_images(tmp_path / split, ["a", "b"], count)
    data = load("folder", tmp_path)
    assert (int((~data.held_out).sum()), int(data.test.sum())) == (8, 4)
    assert int(data.validation.sum()) == 6
    assert data.warnings == ()


def test_folders_between_the_classes_and_their_images_are_refused(tmp_path):
    write_images(tmp_path / "animals", ["cat", "dog"])
    write_images(tmp_path / "plants", ["fern"])
    with pytest.raises(UserError, match=r"cat, dog.*Fix: "):
        load("folder", tmp_path)


def test_transparency_is_on_white_and_the_orientation_flag_applies(tmp_path):
    write_images(tmp_path, ["b"])
    (tmp_path / "a").mkdir()
    drawing = np.zeros((10, 10, 4), dtype=np.uint8)
    drawing[2:4, :, 3] = 255  # two black lines on nothing
    Image.fromarray(drawing).save(tmp_path / "a" / "0.png")
    upright = Image.fromarray(np.repeat(np.arange(10, dtype=np.uint8)[:, None] * 25, 10, axis=1))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    upright.save(tmp_path / "a" / "1.png", exif=exif)
    data = load("folder", tmp_path, grayscale="true")
    assert int(data.x[0].max()) == 255
    assert int(data.x[0, 0, 2].max()) < 128
    assert data.x[1, 0, 0, 0] > data.x[1, 0, -1, 0]
    assert set(data.loaded.converted.values()) == {1}
    assert len(data.loaded.converted) == 2


def test_of_several_frames_the_first_is_read_and_counted(tmp_path):
    write_images(tmp_path, ["a", "b"])
    frames = [Image.fromarray(RNG.integers(0, 256, (10, 10), dtype=np.uint8)) for _ in range(3)]
    frames[0].save(tmp_path / "a" / "film.tiff", save_all=True, append_images=frames[1:])
    assert sum(load("folder", tmp_path).loaded.converted.values()) == 1


SAME = np.repeat(RNG.integers(0, 256, (1, 8, 8), dtype=np.uint8), 40, axis=0)
IMAGES = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8)
LAST = np.arange(40) >= 30
NUMBERS = np.arange(40)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": SAME}, "same"),
        ({"x": SAME + (np.arange(40) % 2)[:, None, None].astype(np.uint8) // 1 * (SAME < 255)}, "same"),
        ({"x": IMAGES % 2}, "0 or 1"),
        ({"x": IMAGES / 255 / 255}, "0 or 1"),
        ({"y": np.arange(40) % 4 * 10}, "occur"),
        ({"y": np.where(LAST, 4, np.arange(40) % 4), "split": LAST}, "class 4"),
        ({"y": np.arange(40) % 4 + 0.0}, "whole numbers"),
        ({"y": np.eye(4)[np.arange(40) % 4]}, "argmax"),
        ({"y": np.arange(40)[:, None] % 4}, r"y\[:, 0\]"),
        ({"y": np.where(LAST, np.nan, np.arange(40) % 4)}, "10 labels"),
        ({"y": np.arange(40) % 4 - 1}, "unlabelled"),
        ({"y": np.array(["", "dog"] * 20)}, "20 labels are missing"),
        ({"owner": np.where(LAST, np.inf, 1.0)}, "owner is missing for 10"),
        ({"owner": np.where(LAST, np.datetime64("NaT"), np.datetime64("2020-01-01"))}, "owner is missing for 10"),
        ({"owner": np.array([b" ", b"eve"] * 20)}, "owner is missing for 20"),
        ({"x": np.zeros((40, 0), np.float32)}, "no numbers"),
        ({"x": IMAGES[:, 0].astype(np.uint64) + 2**63}, "largest token"),
        ({"y": np.arange(40)}, "a label of its own"),
        ({"y": np.array([f"id{k}" for k in range(40)])}, "a label of its own"),
        ({"x": 1.7e9 + np.arange(80.0).reshape(40, 2)}, "32 bits cannot hold .* column 0"),
        ({"x": np.zeros((40, 8, 8, 5), np.uint8)}, "dataset.kind=values"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, arrays, reason):
    with pytest.raises(UserError, match=reason):
        load("npz", save(tmp_path / "a.npz", **arrays))


@pytest.mark.parametrize(
    ("arrays", "changes"),
    [
        ({"x": np.where(np.arange(40)[:, None, None] < 25, SAME, IMAGES)}, {}),
        ({"y": np.where(LAST, np.arange(40) % 3, np.arange(40) % 4), "split": LAST}, {}),
        ({}, {"num_classes": 6}),
        ({"index": np.arange(40)}, {}),
        ({"x": np.concatenate([IMAGES[:20]] * 2), "y": 2 * (NUMBERS // 20) + NUMBERS % 2, "split": NUMBERS % 10 < 2}, {}),
        ({"x": np.where(LAST[:, None, None], IMAGES[NUMBERS - 30], IMAGES), "y": NUMBERS % 10, "split": LAST}, {}),
        ({"x": np.where(np.eye(40)[:, :4] == 1, 1e30, IMAGES[:, 0, :4] / 9)}, {}),
        ({"x": IMAGES[:, :, :1] / 9}, {"kind": "values"}),
    ],
)
def test_what_may_not_be_meant_is_one_warning(tmp_path, arrays, changes):
    assert len(load("npz", save(tmp_path / "a.npz", **arrays), **changes).warnings) == 1


def test_what_is_plain_is_no_warning(tmp_path):
    """A few copies, rare entries of a table, heavy tails, and as many signals as steps."""
    copies = RNG.integers(0, 256, (400, 8, 8), dtype=np.uint8)
    copies[399] = copies[0]
    rare = np.concatenate([np.eye(40)[:, :5], RNG.normal(size=(40, 1))], 1)
    for x, kind in ((copies, None), (rare, None), (RNG.lognormal(size=(40, 6)), None), (RNG.normal(size=(40, 8, 8)), "values")):
        assert load("npz", save(tmp_path / "a.npz", x=x), kind=kind or "null").warnings == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("a.zip", "unpack it"), ("a.csv", "is a file"), ("flat", "each class in a folder"), ("absent", "nothing at")],
)
def test_what_is_no_folder_of_classes_is_one_line(tmp_path, name, reason):
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "flat").mkdir()
    with pytest.raises(UserError, match=reason):
        load("folder", tmp_path / name)


@pytest.mark.parametrize("name", ["a.csv", "a.xlsx", "a.PARQUET"])
def test_a_table_is_no_npz(tmp_path, name):
    (tmp_path / name).write_text("a,b,label\n1,2,0\n")
    with pytest.raises(UserError, match="a table. Fix: read it with pandas"):
        load("npz", tmp_path / name)


@pytest.mark.parametrize("kind", ["U", "S"])
def test_labels_that_are_text_are_numbered(tmp_path, kind):
    data = load("npz", save(tmp_path / "a.npz", x=RNG.normal(size=(40, 6)), y=np.array(["dog", "cat"] * 20).astype(kind)))
    assert describe_loaded(data) == "40 examples of 6 numbers, 2 classes (cat, dog), 30 train, 10 test"
    assert data.y[:4].tolist() == [1, 0, 1, 0]


def test_classes_of_almost_one_name_and_images_outside_of_them_are_told(tmp_path):
    write_images(tmp_path, ["Cat", "cat", "dog"])
    (tmp_path / "dog" / "0.png").rename(tmp_path / "0.png")
    data = load("folder", tmp_path)
    assert [line for line in data.warnings if "Cat, cat" in line] == list(data.warnings)
    assert data.loaded.skipped == {"images outside of the classes": 1}


def test_a_class_of_the_test_split_alone_is_no_fault_once_the_splits_are_merged(tmp_path):
    path = save(tmp_path / "a.npz", y=np.where(LAST, 4, np.arange(40) % 4), split=LAST)
    assert load("npz", path, merge_splits="true").warnings == ()


@pytest.mark.parametrize(("folders", "named"), [(("train", "test", "extra"), "extra left out"), ((), "test counts as a class")])
def test_folders_that_may_be_splits_are_one_warning(tmp_path, folders, named):
    for split in folders:
        write_images(tmp_path / split, ["a", "b"])
    write_images(tmp_path, () if folders else ["a", "b", "test"])
    (tmp_path / "loose.png").write_bytes(b"")
    data = load("folder", tmp_path)
    assert [named in line for line in data.warnings] == [True]
    assert data.loaded.skipped == {"images outside of the classes": 1}


def test_a_link_to_its_own_folder_repeats_no_image(tmp_path):
    write_images(tmp_path, ["a", "b"])
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")
    assert len(load("folder", tmp_path).y) == 12


def test_pixels_that_round_into_the_range_are_taken(tmp_path):
    pixels = IMAGES / 255 * 1.0000004 - 1e-7
    assert np.array_equal(load("npz", save(tmp_path / "a.npz", x=pixels)).x[:, 0].numpy(), IMAGES)


def test_more_classes_than_names_is_no_crash(tmp_path):
    x, y = np.random.default_rng(0).integers(0, 256, (90, 8, 8), dtype=np.uint8), np.array(["cat", "dog", "owl"] * 30)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    changes = {"path": str(tmp_path / "a.npz"), "num_classes": 5}
    data = load_images(choose("dataset", config_of("dataset=npz")["dataset"] | changes))
    assert (data.num_classes, data.loaded.class_names) == (5, ("cat", "dog", "owl"))
