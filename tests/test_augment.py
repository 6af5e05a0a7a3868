"""Augmentation: each change exactly, how changes are drawn, and that training alone has it."""

import math

import numpy as np
import pytest
import torch
from rig import close, config_of, digits_run, workspace_of

from clients.training.augment import augmented, draw_augmentation


def image(height=5, width=6, channels=2):
    return torch.arange(height * width * channels, dtype=torch.float64).view(1, height, width, channels) + 1


def change(angle=0.0, down=0.0, right=0.0, flip=0.0):
    return torch.tensor([[angle, down, right, flip]], dtype=torch.float64)


def test_no_change_leaves_images():
    assert torch.equal(augmented(image(), change()), image())


def test_flip_and_crop_are_exact():
    x = image()
    assert torch.equal(augmented(x, change(flip=1)), x.flip(2))
    shifted = augmented(x, change(down=2, right=-1))
    assert torch.equal(shifted[:, :3, 1:], x[:, 2:, :-1])
    assert not shifted[:, 3:].any()
    assert not shifted[:, :, 0].any()
    # As torchvision orders them: crop first, then the mirror.
    assert torch.equal(augmented(x, change(down=2, right=-1, flip=1)), shifted.flip(2))


def test_rotation_matches_torchvision():
    """By right angles exactly; by 10 degrees as torchvision's nearest-pixel rotation, but for rounding at pixel edges."""
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import rotate

    x = image(6, 6)
    assert torch.equal(augmented(x, change(angle=math.pi / 2)), torch.rot90(x, 1, (1, 2)))
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((1, 32, 32, 1)))
    for degrees in (-10, 3.3, 10):
        ours = augmented(x, change(angle=math.radians(degrees)))[0, ..., 0]
        theirs = rotate(x[0].permute(2, 0, 1), degrees, InterpolationMode.NEAREST)[0]
        assert (ours == theirs).double().mean() > 0.99


def test_augmentation_is_drawn_by_seed_round_and_node():
    kinds = ("rotation", "crop", "flip")
    draw = draw_augmentation(kinds, 32, 4000, 0, "batches", 3, 5)
    assert torch.equal(draw, draw_augmentation(kinds, 32, 4000, 0, "batches", 3, 5))
    assert not torch.equal(draw, draw_augmentation(kinds, 32, 4000, 0, "batches", 4, 5))
    assert draw[:, 0].abs().max() <= math.radians(10)
    assert draw[:, 0].abs().max() > math.radians(9.9)
    for axis in (1, 2):
        assert draw[:, axis].unique().tolist() == list(range(-4, 5))
    assert draw[:, 3].mean().item() == pytest.approx(0.5, abs=0.05)
    crop = draw_augmentation(("crop",), 32, 100, 0, "batches", 3, 5)
    assert not crop[:, [0, 3]].any()
    small = draw_augmentation(("crop",), 8, 1000, 0, "batches", 3, 5)  # digits: one pixel either way
    assert small[:, 1].unique().tolist() == [-1, 0, 1]


ONE_STEP = {"epochs": None, "iterations": 1, "batch_size": 16, "augment": []}


def test_training_is_augmented_and_evaluation_is_not():
    plain, _ = digits_run("fedrcl", 1, nodes=4, local=ONE_STEP)
    changed, _ = digits_run("fedrcl", 1, nodes=4, local=ONE_STEP | {"augment": ["flip"]})
    with pytest.raises(AssertionError):
        close(plain[-1], changed[-1])
    config = config_of("strategy=fedrcl", "num_nodes=4", "model=mlp")
    workspace, bare = (
        workspace_of(config),
        workspace_of(config | {"strategy": config["strategy"] | {"local": config["strategy"]["local"] | ONE_STEP}}),
    )
    clients = [s.client_class(s, [0]) for s in (workspace, bare)]
    scores = [client.evaluate(client.get_parameters({}), {"split": "train"}) for client in clients]
    assert scores[0] == scores[1]
