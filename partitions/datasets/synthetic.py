"""Replace a downloaded data set by images of its shape and classes, from an npz file or generated."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.data.images import GENERATED_PATH, Common, ImageData, make_images
from contrafed.partitions.datasets import npz

# Height, width, channels and classes.
SHAPES = {
    "mnist": (28, 28, 1, 10),
    "fashion_mnist": (28, 28, 1, 10),
    "emnist": (28, 28, 1, 47),
    "femnist": (28, 28, 1, 62),
    "cifar10": (32, 32, 3, 10),
    "cifar100": (32, 32, 3, 100),
    "cinic10": (32, 32, 3, 10),
    "svhn": (32, 32, 3, 10),
    "tiny_imagenet": (64, 64, 3, 200),
}

# Minimum numbers of generated images for training and testing, equal for all classes.
TRAINING, TESTING = 3000, 500
# Writers of the generated FEMNIST, for partition=natural.
NUM_WRITERS = 100


@dataclass(frozen=True)
class Downloaded(Common):
    """Base of the ``Config`` of every downloaded data set."""

    root: str
    download: bool
    path: str | None


def in_place(config: Downloaded, name: str, at_hand: bool, num_classes: int | None = None) -> ImageData | None:
    """Return the images that ``dataset.path`` puts in a data set's place, or None.

    Generated images (``path=generated``) only replace a data set that is not available.

    Args:
        config: Settings of the data set.
        name: The data set's name.
        at_hand: Whether the data set itself is available.
        num_classes: Number of classes, if only some of the data set's are used.

    Raises:
        UserError: If the npz file has another shape or number of classes.
    """
    if config.path is None or (config.path == GENERATED_PATH and at_hand):
        return None
    if name not in SHAPES:
        raise UserError(f"dataset.path goes with {', '.join(SHAPES)}, not with dataset={name}, whose images it cannot know")
    height, width, channels, classes = SHAPES[name]
    classes = num_classes or classes
    if config.path == GENERATED_PATH:
        return replace(draw_images(name, (height, width, channels), classes), stand_in=GENERATED_PATH)
    names = ("merge_splits", "normalize", "fraction", "validation_fraction", "path")
    shared: dict[str, Any] = {name: getattr(config, name) for name in names}
    shared |= {"num_classes": None, "kind": "image", "test_fraction": 0.25, "split_seed": 0}
    data = npz.load(npz.Config(**shared), "npz")
    found = (*data.x.shape[2:], data.x.shape[1], data.num_classes)
    if found != (height, width, channels, classes):
        raise UserError(
            f"dataset.path: images of {config.path} have {found[0]}x{found[1]} pixels, {found[2]} channels and {found[3]} "
            f"classes; dataset={name} has {height}x{width}, {channels} and {classes}"
        )
    return replace(data, stand_in=config.path)


def draw_images(name: str, shape: tuple[int, int, int], classes: int) -> ImageData:
    """Return generated images (H, W, C): a smooth pattern for each class plus noise, equal on every call."""
    rng = generator(0, f"stand-in for {name}")
    height, width, channels = shape
    coarse = rng.uniform(64, 192, (classes, 4, 4, channels))
    patterns = coarse.repeat(-(-height // 4), 1).repeat(-(-width // 4), 2)[:, :height, :width]
    each = [-(-count // classes) for count in (TRAINING, TESTING)]
    y = np.concatenate([np.tile(np.arange(classes), count) for count in each])
    x = patterns[y] + rng.normal(0, 40, (len(y), *shape))
    test = np.repeat([False, True], [classes * count for count in each])
    owner = rng.permutation(len(y)) % NUM_WRITERS if name == "femnist" else None
    return make_images(x.clip(0, 255).astype(np.uint8), y, test, classes, owner)
