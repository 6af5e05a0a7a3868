"""Partitions of generated images, with equal classes in random order."""

import numpy as np
from helpers import config_of, with_images

from contrafed.core.client_run import choose
from contrafed.data.partition import make_partition


def data_of(count=2000, classes=10, test=0, owner=None, seed=0):
    y = np.random.default_rng(seed).permutation(np.arange(count) % classes).astype(np.int64)
    x = np.zeros((count, 1, 8, 8), dtype=np.uint8)
    mask = np.arange(count) >= count - test
    return with_images(x, y, mask, owner, classes)


def data_with_a_gap():
    """Return data of ten classes, the last two without an example."""
    y = (np.arange(2000) % 8).astype(np.int64)
    return with_images(np.zeros((2000, 1, 8, 8), dtype=np.uint8), y, np.zeros(2000, dtype=bool), None, 10)


def settings_of(name, **changes):
    return choose("partition", config_of(f"partition={name}")["partition"] | changes)


def make(name, clients=20, seed=0, data=None, merged=False, **changes):
    return make_partition(settings_of(name, **changes), data or data_of(), clients, seed, merged)
