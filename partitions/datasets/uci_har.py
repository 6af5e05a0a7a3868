"""uci_har: six activities of 30 people by their phone's sensors, read from a copy, or generated with its shape."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.data.images import GENERATED_PATH, Common, ImageData
from contrafed.data.values import make_values

# Of the published data set (Anguita et al. 2013): features of a window, its signals, people, and those of the test split.
NUM_FEATURES, NUM_STEPS, NUM_CLASSES, NUM_PEOPLE, NUM_TEST_PEOPLE = 561, 128, 6, 30, 9
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
GENERATED_WINDOWS = 40  # of each person


@dataclass(frozen=True)
class Config(Common):
    """Settings of the data set."""

    path: str
    inputs: Literal["features", "signals"]


def load(config: Config, name: str) -> ImageData:
    """Return windows of 2.56 s as 561 features, or as nine signals of 128 steps. The owner of a window is its person.

    Raises:
        UserError: If a file of the data set is missing or damaged.
    """
    if config.path == GENERATED_PATH:
        return replace(_draw(config.inputs), stand_in=GENERATED_PATH)
    root = Path(config.path).expanduser()
    parts = [_read_split(root / split, split, config.inputs) for split in ("train", "test")]
    x, y, owner = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    test = np.repeat([False, True], [len(part[1]) for part in parts])
    try:
        return make_values(x, y, test, NUM_CLASSES, owner)
    except UserError as error:
        raise UserError(f"{root}: {error}") from None


def _read_split(folder: Path, split: str, inputs: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values (n, ...), labels (n,) and people (n,) of a split."""
    labels, people = (_read(folder / f"{name}_{split}.txt").astype(np.int64).reshape(-1) for name in ("y", "subject"))
    if inputs == "features":
        return _read(folder / f"X_{split}.txt"), labels - 1, people
    signals = [_read(folder / "Inertial Signals" / f"{signal}_{split}.txt") for signal in SIGNALS]
    return np.stack(signals, axis=1), labels - 1, people


def _read(file: Path) -> np.ndarray:
    """Return the numbers of a text file (rows, columns)."""
    try:
        return np.loadtxt(file, dtype=np.float32, ndmin=2)
    except (OSError, ValueError) as error:
        fix = "Fix: name the unpacked folder 'UCI HAR Dataset', or dataset.path=generated"
        raise UserError(f"dataset.path: cannot read {file} ({' '.join(str(error).split())}). {fix}") from error


def _draw(inputs: str) -> ImageData:
    """Return generated windows: a pattern for each activity, moved by each person's own offset, plus noise."""
    rng = generator(0, "generated uci_har")
    owner = np.repeat(np.arange(1, NUM_PEOPLE + 1), GENERATED_WINDOWS)
    y = np.tile(np.arange(NUM_CLASSES), -(-len(owner) // NUM_CLASSES))[: len(owner)]
    test = owner > NUM_PEOPLE - NUM_TEST_PEOPLE
    if inputs == "features":
        patterns, offsets = rng.normal(0, 0.3, (NUM_CLASSES, NUM_FEATURES)), rng.normal(0, 0.3, (NUM_PEOPLE, NUM_FEATURES))
        x = patterns[y] + offsets[owner - 1] + rng.normal(0, 1, (len(y), NUM_FEATURES))
        return make_values(x, y, test, NUM_CLASSES, owner)
    steps, start = np.arange(NUM_STEPS) / NUM_STEPS, rng.uniform(0, 1, (len(y), 1, 1))
    pace = rng.uniform(1, 12, (NUM_CLASSES, len(SIGNALS), 1))[y]
    strength = rng.uniform(0.5, 1.5, (NUM_PEOPLE, len(SIGNALS), 1))[owner - 1]
    x = strength * np.sin(2 * np.pi * (pace * steps + start)) + rng.normal(0, 1, (len(y), len(SIGNALS), NUM_STEPS))
    return make_values(x, y, test, NUM_CLASSES, owner)
