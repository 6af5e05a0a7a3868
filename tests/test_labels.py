"""What data say of each example: marks of splits in own data sets, and labels and owners that are missing."""

import numpy as np
import pytest
import torch
from test_loaded import load

from contrafed.data.fingerprint import fingerprint_images
from contrafed.data.images import make_images
from contrafed.data.values import make_values

RNG = np.random.default_rng(0)
LABELS = np.arange(40) % 2
SPLIT = np.arange(40) // 2 % 4  # 0 and 1: training, 2: test, 3: validation
IMAGES = RNG.integers(0, 256, (40, 8, 8), dtype=np.uint8)
TABLE = RNG.normal(size=(40, 5))
MAKERS = ((make_images, IMAGES), (make_values, TABLE))
# What the writers of CSV files, pandas and Python make of a missing value in a column of text.
MISSING = ["nan", " NaN", "None", "<NA>", "NaT", " "]


@pytest.mark.parametrize(("make", "x"), MAKERS)
@pytest.mark.parametrize("form", [np.int64, np.uint8, np.float64, torch.from_numpy, np.ndarray.tolist])
def test_marks_of_0_and_1_keep_splits_from_training(make, x, form):
    """Of 0 and 1, ``~`` is -1 and -2: every example would be for training, and the moments those of the last two."""
    test, validation = SPLIT == 2, SPLIT == 3
    found = make(x, LABELS, form(test), validation=form(validation))
    expected = make(x, LABELS, test, validation=validation)
    assert (found.test.dtype, found.validation.dtype) == (torch.bool, torch.bool)
    assert np.flatnonzero(~found.held_out.numpy()).tolist() == np.flatnonzero(SPLIT < 2).tolist()
    assert torch.equal(found.validation, expected.validation)
    assert (found.mean, found.std) == (expected.mean, expected.std)
    alone = make(x[SPLIT < 2], LABELS[SPLIT < 2], np.zeros(20, dtype=int))
    assert found.mean == pytest.approx(alone.mean)
    assert found.std == pytest.approx(alone.std)


@pytest.mark.parametrize(("make", "x"), MAKERS)
@pytest.mark.parametrize("marks", [SPLIT, SPLIT[:, None] == 2, SPLIT[:9] == 2, ["train", "test"] * 20, 0.5])
def test_other_marks_are_one_line(expect_error, make, x, marks):
    with expect_error() as error:
        make(x, LABELS, marks)
    assert "the test split" in str(error.value)
    with expect_error() as error:
        make(x, LABELS, SPLIT == 2, validation=marks)
    assert "the validation split" in str(error.value)


@pytest.mark.parametrize("labels", [LABELS / 2, LABELS[:, None], LABELS > 0])
def test_labels_of_an_own_table_are_whole_numbers(expect_error, labels):
    with expect_error():
        make_values(TABLE, labels, SPLIT == 2)


@pytest.mark.parametrize("text", MISSING)
def test_missing_text_is_no_class_and_no_owner(tmp_path, expect_error, text):
    words = np.array([text if i % 10 == 9 else ("cat", "dog")[i % 2] for i in range(40)])
    for arrays in ({"y": words}, {"y": LABELS, "owner": words}, {"y": LABELS, "owner": words.astype(bytes)}):
        np.savez(tmp_path / "data.npz", x=TABLE, **arrays)
        with expect_error():
            load("npz", tmp_path / "data.npz")


def test_a_missing_label_of_a_column_of_text_is_text(tmp_path, expect_error):
    column = ["cat", "dog", float("nan"), "dog"] * 10  # as pandas reads a CSV file
    np.savez(tmp_path / "data.npz", x=TABLE, y=np.array(column))
    with expect_error():
        load("npz", tmp_path / "data.npz")


def test_names_that_begin_like_a_missing_value_are_names(tmp_path):
    names = np.array(["Nancy", "nonesuch"] * 20)
    np.savez(tmp_path / "data.npz", x=TABLE, y=names, owner=names)
    data = load("npz", tmp_path / "data.npz")
    assert data.loaded.class_names == ("Nancy", "nonesuch")


def test_owners_that_are_objects_have_one_fingerprint():
    """A column of pandas holds pointers, which differ between processes."""
    images, labels = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])

    def fingerprint(*names):
        owner = np.array([bytes(name).decode() for name in names], dtype=object)  # new objects each time
        return fingerprint_images(make_images(images, labels, np.array([0, 0, 0, 1]), owner=owner))

    assert fingerprint(b"ann", b"ben", b"ann", b"ben") == fingerprint(b"ann", b"ben", b"ann", b"ben")
    assert fingerprint(b"ann", b"ben", b"ann", b"ben") != fingerprint(b"ann", b"ann", b"ann", b"ben")
