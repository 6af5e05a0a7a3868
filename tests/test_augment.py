"""Augmentation: each transform exactly, the draws, and its use in training alone."""

import math

import numpy as np
import pytest
import torch
from helpers import close, config_of, digits_run, workspace_of

from contrafed.training.augment import (
    COLOURS,
    augment_images,
    brighten,
    change_colours,
    draw_augmentation,
    equalise,
    sharpen,
    shift_hue,
)


def image(height=5, width=6, channels=2):
    return torch.arange(height * width * channels, dtype=torch.float64).view(1, height, width, channels) + 1


def change(angle=0.0, down=0.0, right=0.0, flip=0.0):
    return torch.tensor([[angle, down, right, flip]], dtype=torch.float64)


def test_no_change_leaves_images():
    assert torch.equal(augment_images(image(), change()), image())


def test_flip_and_crop_are_exact():
    x = image()
    assert torch.equal(augment_images(x, change(flip=1)), x.flip(2))
    shifted = augment_images(x, change(down=2, right=-1))
    assert torch.equal(shifted[:, :3, 1:], x[:, 2:, :-1])
    assert not shifted[:, 3:].any()
    assert not shifted[:, :, 0].any()
    # As torchvision orders them: crop first, then the mirror.
    assert torch.equal(augment_images(x, change(down=2, right=-1, flip=1)), shifted.flip(2))


def test_rotation_matches_torchvision():
    """Right angles are exact. 10 degrees equals torchvision's nearest-pixel rotation, except for rounding at pixel edges."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import rotate

    x = image(6, 6)
    assert torch.equal(augment_images(x, change(angle=math.pi / 2)), torch.rot90(x, 1, (1, 2)))
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((1, 32, 32, 1)))
    for degrees in (-10, 3.3, 10):
        ours = augment_images(x, change(angle=math.radians(degrees)))[0, ..., 0]
        theirs = rotate(x[0].permute(2, 0, 1), degrees, InterpolationMode.NEAREST)[0]
        assert (ours == theirs).double().mean() > 0.99


def test_augmentation_is_drawn_by_seed_round_and_client():
    kinds = ("rotation", "crop", "flip")
    draw = draw_augmentation(kinds, 32, 4000, 0, "batches", 3, 5)
    assert torch.equal(draw, draw_augmentation(kinds, 32, 4000, 0, "batches", 3, 5))
    assert not torch.equal(draw, draw_augmentation(kinds, 32, 4000, 0, "batches", 4, 5))
    assert draw[:, 0].abs().max() <= math.radians(10)
    assert draw[:, 0].abs().max() > math.radians(9.9)
    for axis in (1, 2):
        assert draw[:, axis].unique().tolist() == list(range(-4, 5))
    assert draw[:, 3].mean().item() == pytest.approx(0.5, abs=0.05)
    assert not draw_augmentation(("crop",), 32, 100, 0, "batches", 3, 5)[:, [0, 3]].any()
    small = draw_augmentation(("crop",), 8, 1000, 0, "batches", 3, 5)  # digits: one pixel either way
    assert small[:, 1].unique().tolist() == [-1, 0, 1]


def pictures(count=6, channels=3):
    """Return random pictures (n, C, H, W) uint8: noise, smooth ones, one of few levels, one grey, one of a single level."""
    rng = torch.Generator().manual_seed(3)
    x = (torch.rand(count, channels, 32, 32, generator=rng) * 256).to(torch.uint8)
    x[1] = torch.nn.functional.interpolate(x[1:2].float()[..., :4, :4], (32, 32), mode="bilinear")[0].to(torch.uint8)
    x[2] = x[2] // 100 * 100
    x[3] = x[3, :1]
    x[4] = 77
    x[5] = x[1] // 4 + 100
    return x


def laid(x):
    """Return (n, C, H, W) in the layout of a workspace."""
    return x.permute(0, 2, 3, 1).float()


def off(ours, theirs):
    """Return the difference of each number in levels."""
    return (ours - laid(theirs)).abs()


@pytest.mark.parametrize("channels", [1, 3])
def test_colours_match_torchvision_on_uint8(channels):
    from torchvision.transforms.v2 import functional as tv

    x = pictures(channels=channels)
    assert off(sharpen(laid(x)), tv.adjust_sharpness(x, 2)).max() == 0
    assert off(equalise(laid(x)), tv.equalize(x)).max() == 0
    for value in (0.953, 1.0, 1.0499):
        factor = torch.tensor(value)
        assert off(brighten(laid(x), factor.view(1, 1, 1, 1)), tv.adjust_brightness(x, factor.item())).max() == 0
    for value in (-0.05, -0.013, 0.031, 0.05):
        hue = off(shift_hue(laid(x), torch.full((6, 1, 1, 1), value)), tv.adjust_hue(x, value))
        assert hue.max() <= 1  # where rounding falls to either side of a whole number
        assert (hue > 0).float().mean() < 0.001
    posterised = torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0, 0.0]]).expand(6, -1)
    assert off(change_colours(laid(x), posterised), tv.posterize(x, 2)).max() == 0


@pytest.mark.parametrize("first", [True, False])
def test_the_chain_of_cifar_100_matches_torchvisions(first):
    from torchvision.transforms.v2 import functional as tv

    x, brightness, hue = pictures(), torch.tensor(1.03).item(), -0.02
    theirs = tv.adjust_sharpness(x, 2)
    for step in ("brightness", "hue") if first else ("hue", "brightness"):
        theirs = tv.adjust_brightness(theirs, brightness) if step == "brightness" else tv.adjust_hue(theirs, hue)
    theirs = tv.horizontal_flip(tv.crop(tv.equalize(tv.posterize(theirs, 2)), 3, -1, 32, 32))
    change = torch.tensor([[0.0, 3.0, -1.0, 1.0, 1.0, brightness, hue, float(first), 1.0, 1.0]]).expand(6, -1)
    assert (off(augment_images(laid(x), change), theirs) > 0).float().mean() < 0.002
    nothing = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]).expand(6, -1)
    assert torch.equal(augment_images(laid(x).double(), nothing), laid(x).double())


def test_colours_have_draws_of_their_own():
    where = (32, 4000, 0, "batches", 3, 5)
    plain, both = draw_augmentation(("crop", "flip"), *where), draw_augmentation((*COLOURS, "crop", "flip"), *where)
    assert torch.equal(plain, both[:, :4])
    assert both[:, [4, 7, 8, 9]].mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.05)
    assert both[:, 5:7].amin(0).tolist() == pytest.approx([0.95, -0.05], abs=1e-3)
    assert both[:, 5:7].amax(0).tolist() == pytest.approx([1.05, 0.05], abs=1e-3)
    assert np.abs(np.corrcoef(both.T[1:].numpy()) - np.eye(9)).max() < 0.1
    one = draw_augmentation(("equalize",), *where)
    assert torch.equal(one[:, 9], both[:, 9])
    assert one[:, 4:9].unique(dim=0).tolist() == [[0, 1, 0, 0, 0], [0, 1, 0, 1, 0]]


def test_experiments_of_pmfl_augment_by_data_set():
    moves = ["crop", "flip"]
    for name, kinds in (("cifar10", moves), ("cinic10", moves), ("svhn", ["crop"]), ("cifar100", [*COLOURS, *moves])):
        assert config_of("experiment=pmfl/base", f"dataset={name}")["strategy"]["local"]["augment"] == kinds


ONE_STEP = {"epochs": None, "iterations": 1, "batch_size": 16, "augment": []}


def test_training_is_augmented_and_evaluation_is_not():
    plain, _ = digits_run("fedrcl", 1, clients=4, local=ONE_STEP)
    changed, _ = digits_run("fedrcl", 1, clients=4, local=ONE_STEP | {"augment": ["flip"]})
    with pytest.raises(AssertionError):
        close(plain[-1], changed[-1])
    config = config_of("strategy=fedrcl", "num_clients=4", "model=mlp")
    workspace, bare = (
        workspace_of(config),
        workspace_of(config | {"strategy": config["strategy"] | {"local": config["strategy"]["local"] | ONE_STEP}}),
    )
    clients = [s.client_class(s, [0]) for s in (workspace, bare)]
    scores = [client.evaluate(client.get_parameters({}), {"split": "train"}) for client in clients]
    assert scores[0] == scores[1]
