"""Images that replace a downloaded data set, and a share of one."""

import numpy as np
import pytest
from helpers import config_of, slow

from contrafed.core.client_run import client_run_of
from contrafed.data.images import check, load_images
from contrafed.partitions.datasets.synthetic import SHAPES, TESTING, TRAINING
from contrafed.runs.run import run


def chosen(*overrides):
    return client_run_of(config_of(*overrides)).dataset


def npz(path, shape, classes, each=4):
    y = np.tile(np.arange(classes), each)
    x = np.random.default_rng(0).integers(0, 256, (len(y), *shape), dtype=np.uint8)
    np.savez(path, x=x, y=y, split=np.arange(len(y)) % 4 == 0)
    return path


@pytest.mark.parametrize("name", [slow(name) if name in ("tiny_imagenet", "cifar100", "cinic10") else name for name in SHAPES])
def test_drawn_images_have_the_data_sets_shape_and_classes(name, tmp_path):
    data = load_images(
        chosen(f"dataset={name}", "dataset.path=generated", f"dataset.root={tmp_path}", "dataset.download=false")
    )
    height, width, channels, classes = SHAPES[name]
    assert data.x.shape[1:] == (channels, height, width)
    assert (data.num_classes, data.stand_in) == (classes, "generated")
    test, train = data.y[data.test].bincount(), data.y[~data.test].bincount()
    assert len(set(test.tolist())) == len(set(train.tolist())) == 1
    assert len(test) == len(train) == classes
    assert (train.sum() >= TRAINING, test.sum() >= TESTING) == (True, True)


def test_drawn_images_can_be_told_apart_and_are_always_the_same(tmp_path):
    once, again = (load_images(chosen("dataset=svhn", "dataset.path=generated", f"dataset.root={tmp_path}")) for _ in range(2))
    assert (once.x == again.x).all()
    x, y = once.x.float().flatten(1), once.y
    centres = np.stack([x[(y == c) & ~once.test].mean(0).numpy() for c in range(10)])
    nearest = ((x[once.test].numpy()[:, None] - centres) ** 2).sum(-1).argmin(1)
    assert (nearest == y[once.test].numpy()).mean() > 0.99


def test_the_data_set_itself_goes_before_drawn_images(tmp_path, expect_error):
    settings = chosen("dataset=cifar10", "dataset.path=generated", f"dataset.root={tmp_path}", "dataset.download=false")
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()  # as a failed download leaves it
    assert load_images(settings).stand_in == "generated"
    (folder / "data_batch_1").write_bytes(b"damaged")
    with expect_error("dataset"):  # no images are drawn in its place
        load_images(settings)


@pytest.mark.parametrize(
    "there",
    [
        "flwrlabs___cinic10/default/cinic10-train.arrow",  # of the same owner
        "flwrlabs___femnist2/default/femnist2-train.arrow",
        "flwrlabs___femnist/default/0.0.0/femnist-train.lock",  # left by a download that failed
    ],
)
def test_what_is_not_the_data_set_is_not_at_hand(tmp_path, there, expect_error):
    (tmp_path / "hub" / there).parent.mkdir(parents=True)
    (tmp_path / "hub" / there).touch()
    settings = chosen("dataset=femnist", "dataset.path=generated", f"dataset.root={tmp_path}", "dataset.download=false")
    assert load_images(settings).stand_in == "generated"
    with expect_error("dataset"):
        check(chosen("dataset=femnist", f"dataset.root={tmp_path}", "dataset.download=false"))


def test_a_repository_with_capitals_is_found_in_the_cache(tmp_path, expect_error):
    """The library writes the name in lower case."""
    wanted = ("dataset=hub", "dataset.repository=Someone/Brain_MRI", f"dataset.root={tmp_path}", "dataset.download=false")
    with expect_error("dataset"):
        check(chosen(*wanted))
    table = tmp_path / "hub" / "Someone___brain_mri" / "default" / "0.0.0" / "abc" / "brain_mri-train.arrow"
    table.parent.mkdir(parents=True)
    table.touch()
    check(chosen(*wanted))


@pytest.mark.parametrize(("shape", "classes"), [((28, 28, 3), 10), ((32, 32), 10), ((32, 32, 3), 9)])
def test_an_npz_of_another_kind_is_one_line(tmp_path, shape, classes, expect_error):
    path = npz(tmp_path / "a.npz", shape, classes)
    with expect_error("dataset.path"):
        load_images(chosen("dataset=cifar10", f"dataset.path={path}"))
    with expect_error("dataset.path"):
        check(chosen("dataset=cifar10", "dataset.path=/no/such.npz"))


def test_an_npz_stands_in_and_the_summary_says_so(tmp_path, capsys):
    path = npz(tmp_path / "mine.npz", (32, 32, 3), 10, each=12)
    quick = ("engine=local", "num_clients=3", "num_rounds=1", "model=mlp", "model.hidden=[4]", "partition=iid")
    summary = run(config_of("dataset=cifar10", f"dataset.path={path}", *quick, f"output_dir={tmp_path}/run"))
    assert (summary["dataset"], summary["stand_in"]) == ("cifar10", str(path))
    assert f"({path} images in place of cifar10)" in capsys.readouterr().out


def test_letters_alone_are_the_classes_of_their_stand_in(tmp_path):
    path = npz(tmp_path / "letters.npz", (28, 28), 3)
    data = load_images(chosen("dataset=femnist", "dataset.classes=[36,37,38]", f"dataset.path={path}"))
    assert data.num_classes == 3


def test_a_fraction_keeps_that_share_of_each_class_and_split(tmp_path):
    whole, half = (load_images(chosen("dataset=digits", f"dataset.fraction={share}")) for share in (1.0, 0.5))
    for split in (False, True):
        all_of, some = (data.y[data.test == split].bincount(minlength=10) for data in (whole, half))
        assert some.tolist() == [round(0.5 * n) for n in all_of.tolist()]
    assert len(load_images(chosen("dataset=digits", "dataset.fraction=0.0001")).y) == 20
