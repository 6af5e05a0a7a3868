"""Hold images as tensors: the whole data set is on a worker's device as uint8, and clients are index arrays into it."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from torch import Tensor

from contrafed.core import registry
from contrafed.core.client_run import Choice
from contrafed.core.disk import absent
from contrafed.core.errors import UserError
from contrafed.core.inputs import Inputs, Kind
from contrafed.core.randomness import generator
from contrafed.core.schema import Range
from contrafed.data.fingerprint import fingerprint_images
from contrafed.data.labels import as_array, as_marks, check_classes, check_numbers
from contrafed.data.loaded import Loaded, check_loaded

if TYPE_CHECKING:
    from PIL.Image import Image

# Mean and standard deviation by channel of ImageNet, with which torchvision's weights were trained.
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
GENERATED_PATH = "generated"  # value of dataset.path for drawn images
MIN_SIDE_PX = 8  # pixels a side: the smallest image that every model accepts


@dataclass(frozen=True)
class Common:
    """Settings that the ``Config`` of every data set inherits."""

    merge_splits: bool
    fraction: Annotated[float, Range(gt=0, le=1)]
    validation_fraction: Annotated[float, Range(ge=0, lt=1)]
    normalize: Literal["moments", "half", "image_deviations", "imagenet"]


@dataclass(frozen=True)
class ImageData:
    """A labelled image set with a central test split, and a central validation split if it has one."""

    x: Tensor  # (N, C, H, W) uint8
    y: Tensor  # (N,) int64 labels 0..num_classes-1
    test: Tensor  # (N,) bool, True: central test split
    mean: tuple[float, ...]  # per channel of x/255, over the training part. ImageNet's three fit grey images too
    std: tuple[float, ...]
    num_classes: int
    owner: np.ndarray | None  # (N,) the client each example comes from, where the data set knows
    stand_in: str | None = None  # the npz that these come from in a data set's place, or that they are drawn
    fingerprint: str = ""  # by which other data are noticed, once they are loaded
    loaded: Loaded = field(default_factory=Loaded)
    warnings: tuple[str, ...] = ()  # of data that may not be what was meant
    validation: Tensor | None = None  # (N,) bool, True: central validation split. None without one
    kind: Kind = "image"  # values: x is (N, C, ...) float32, a table's (N, 1, F). tokens: x is (N, 1, n) int64

    @property
    def inputs(self) -> Inputs:
        """What an example is, for the network."""
        tokens = int(self.x.max()) + 1 if self.kind == "tokens" else 0
        return Inputs(self.kind, tuple(self.x.shape[1:]), tokens)

    @property
    def held_out(self) -> Tensor:
        """Marks the examples that no client trains on (N,): the central test and validation splits."""
        return self.test if self.validation is None else self.test | self.validation


def make_images(
    x: np.ndarray,
    y: np.ndarray,
    test: np.ndarray,
    num_classes: int | None = None,
    owner: np.ndarray | None = None,
    loaded: Loaded | None = None,
    validation: np.ndarray | None = None,
) -> ImageData:
    """Return checked ``ImageData``. Lists and tensors are accepted as arrays.

    Args:
        x: Images (N, H, W) or (N, H, W, C), uint8.
        y: Labels (N,), whole numbers.
        test: Marks the central test split (N,), bool or 0 and 1.
        num_classes: Number of classes. None means the largest label + 1, and each label must occur.
        owner: The client that each example comes from (N,), or None.
        loaded: What the loader saw besides, such as the names of the classes.
        validation: Marks the central validation split (N,) likewise, or None without one.

    Raises ``UserError`` for an unsupported size or channel count, other lengths or labels, or no training images.
    """
    x, y, owner = as_array(x, "images"), as_array(y, "labels"), None if owner is None else as_array(owner, "owners")
    x = x[..., None] if x.ndim == 3 else x
    if x.ndim != 4 or x.dtype != np.uint8:
        raise UserError(f"images must be uint8 (N,H,W) or (N,H,W,C), got {x.dtype} {x.shape}")
    count, height, width, channels = x.shape
    if min(height, width) < MIN_SIDE_PX or channels not in (1, 3):
        first = height in (1, 3) and channels not in (1, 3)
        raise UserError(
            f"images must be at least {MIN_SIDE_PX}x{MIN_SIDE_PX} with 1 or 3 channels, got {height}x{width} with {channels}"
            + ("; channels come last: x.transpose(0, 2, 3, 1)" if first else "")
        )
    check_numbers(y)
    if len(y) != count:
        raise UserError(f"{count} images and {len(y)} labels do not match")
    if owner is not None and owner.shape != (count,):
        owners = len(owner) if owner.ndim == 1 else owner.shape
        raise UserError(f"{count} images and {owners} owners do not match")
    test, validation = as_marks(test, count, "test"), None if validation is None else as_marks(validation, count, "validation")
    held = test if validation is None else test | validation
    classes = check_classes(y, held, num_classes)
    images = torch.from_numpy(np.ascontiguousarray(x)).permute(0, 3, 1, 2)  # channels last in memory
    labels, moments = torch.from_numpy(y.astype(np.int64)), _moments(x[~held])
    checked = None if validation is None else torch.from_numpy(validation)
    split = torch.from_numpy(test)
    return ImageData(images, labels, split, *moments, classes, owner, loaded=loaded or Loaded(), validation=checked)


def check_depth(image: "Image", where: str) -> None:
    """Raise ``UserError`` for a Pillow image with more than 8 bits a channel, because conversion would make it white."""
    if image.mode.startswith(("I", "F")):
        raise UserError(f"{where}: an image has more than 8 bits a channel; save it with 8, or give dataset=npz floats in 0..1")


def _moments(x: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of x/255 by channel. Counts of integers make them exact and need little memory."""
    means, stds = [], []
    for channel in range(x.shape[-1]):
        counts = np.bincount(x[..., channel].reshape(-1), minlength=256)
        levels = np.arange(256) / 255
        mean = float((counts * levels).sum() / counts.sum())
        variance = float((counts * (levels - mean) ** 2).sum() / counts.sum())
        means.append(mean)
        stds.append(max(variance**0.5, 1e-3))  # a constant channel must not divide by zero
    return tuple(means), tuple(stds)


def moments_of_values(x: Tensor, by_column: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of values (n, C, ...) for each channel, or of a table (n, 1, F) for each column."""
    flat = x.double().transpose(1, 2) if by_column else x.double().flatten(2)
    mean, std = flat.mean((0, 2)), flat.std((0, 2), correction=0)
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())


def image_deviations(x: Tensor) -> tuple[float, ...]:
    """Compute the standard deviation of each image, and return its mean over images.

    Args:
        x: Images (N, C, H, W), uint8.

    Returns:
        By channel, in units of x/255.
    """
    parts = [part.flatten(2).double().std(2, correction=0) for part in x.split(1024)]
    return tuple(max(value, 1e-3) for value in (torch.cat(parts).mean(0) / 255).tolist())


def stratified_split(y: np.ndarray, test_fraction: float, seed: int, purpose: str = "test split") -> np.ndarray:
    """Return (N,) bool, True for about ``test_fraction`` of each class, drawn only from ``seed`` and ``purpose``.

    At least one example of each class stays in training.
    """
    rng = generator(seed, purpose)
    test = np.zeros(len(y), dtype=bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        test[members[: min(round(test_fraction * len(members)), len(members) - 1)]] = True
    return test


def load_images(dataset: Choice) -> ImageData:
    """Load the chosen data set. With ``merge_splits`` there is no central test split (FedCRL's protocol).

    With ``normalize: half`` pixels are mapped to [-1, 1] for every data set. Otherwise mean and std are those of the published
    training part, because merged images are also the clients' test images. With ``image_deviations`` images are divided by the
    mean over images of each image's standard deviation. The code of FedAU and FedRCL does so for CIFAR-10. With ``imagenet``
    mean and std are ImageNet's, which weights of torchvision expect. A network that takes grey images gets their average.

    Raises:
        UserError: For missing or damaged data, or if ``load`` does not return ``ImageData``.
    """
    _check_path(dataset)
    with registry.report_author_errors(f"dataset={dataset.name}: {dataset.module.__name__}.load", str(dataset.module.__file__)):
        data: ImageData = dataset.module.load(dataset.config, dataset.name)
    if not isinstance(data, ImageData):
        raise UserError(
            f"dataset={dataset.name}: {dataset.module.__name__}.load must return ImageData, got {type(data).__name__}"
        )
    if dataset.config.normalize == "image_deviations" and data.kind == "image":
        data = replace(data, std=image_deviations(data.x[~data.held_out]))
    generated = data.stand_in == GENERATED_PATH  # which are few
    if dataset.config.fraction < 1 and not generated:
        data = subsample_images(data, dataset.config.fraction)
    if dataset.config.merge_splits:
        data = replace(data, test=torch.zeros_like(data.test), validation=None)
    if dataset.config.validation_fraction:
        data = cut_validation(data, dataset.config)
    if dataset.config.normalize == "half":
        halves = (0.5,) * len(data.mean)
        data = replace(data, mean=halves, std=halves)
    if dataset.config.normalize == "imagenet":
        data = replace(data, mean=IMAGENET[0], std=IMAGENET[1])
    warnings = () if generated else tuple(check_loaded(data, f"dataset={dataset.name}"))
    if dataset.config.fraction < 1 and generated:
        warnings = (f"dataset.fraction={dataset.config.fraction:g}: no effect on generated data",)
    fingerprint = fingerprint_images(data)
    return replace(data, fingerprint=fingerprint, warnings=warnings)


def subsample_images(data: ImageData, fraction: float) -> ImageData:
    """Return the same share of each class in each split, at least one image, in their order. The choice is always the same."""
    rng = generator(0, "fraction of the images")
    kept = []
    for label in range(data.num_classes):
        for split in (~data.held_out, data.test, *([] if data.validation is None else [data.validation])):
            members = np.flatnonzero(((data.y == label) & split).numpy())
            kept.append(rng.permutation(members)[: max(1, round(fraction * len(members)))])
    some = np.sort(np.concatenate(kept))
    owner = None if data.owner is None else data.owner[some]
    validation = None if data.validation is None else data.validation[some]
    return replace(data, x=data.x[some], y=data.y[some], test=data.test[some], owner=owner, validation=validation)


def cut_validation(data: ImageData, config: Common) -> ImageData:
    """Return the data with ``validation_fraction`` of each class of the training images as the central validation split.

    The choice is always the same. Without ``merge_splits`` mean and std are those of the images that are left, so that
    validation images have no influence on training.

    Raises:
        UserError: If the data have validation images already.
    """
    if data.validation is not None:
        raise UserError("dataset.validation_fraction: the data have a validation split already. Fix: set it to 0")
    training = ~data.test.numpy()
    validation = np.zeros(len(data.y), dtype=bool)
    validation[training] = stratified_split(data.y.numpy()[training], config.validation_fraction, 0, "validation split")
    data = replace(data, validation=torch.from_numpy(validation))
    if config.merge_splits or config.normalize == "half" or data.kind == "tokens":
        return data
    left = data.x[~data.held_out]
    if data.kind == "values":
        mean, std = moments_of_values(left, len(data.mean) > len(left[0]))
        return replace(data, mean=mean, std=std)
    mean, std = _moments(left.permute(0, 2, 3, 1).numpy())
    return replace(data, mean=mean, std=image_deviations(left) if config.normalize == "image_deviations" else std)


def check(dataset: Choice) -> None:
    """Raise ``UserError`` for settings that contradict each other, or for a missing file. Loads no data."""
    _check_path(dataset)
    if hasattr(dataset.module, "check"):
        dataset.module.check(dataset.config, dataset.name)


def _check_path(dataset: Choice) -> None:
    if hasattr(dataset.config, "path"):
        if dataset.config.path is None and hasattr(dataset.config, "download"):  # the path is only for replacement images
            return
        if dataset.config.path is None:
            raise UserError(f"dataset={dataset.name}: it needs a path. Fix: dataset.path=PATH")
        if dataset.config.path != GENERATED_PATH and not Path(dataset.config.path).expanduser().exists():
            raise absent("dataset.path", dataset.config.path, "nothing at")
