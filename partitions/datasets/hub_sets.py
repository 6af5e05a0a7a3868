"""Image data sets of the Hugging Face hub through flwr-datasets: CINIC-10, FEMNIST, Tiny-ImageNet, or any other name."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from contrafed.core.errors import UserError, unknown
from contrafed.core.schema import Range
from contrafed.data.images import ImageData, check_depth, make_images, stratified_split
from contrafed.data.labels import check_labels, check_owners, number_labels
from contrafed.data.loaded import Loaded, convert_image
from contrafed.partitions.datasets.network import reachable
from contrafed.partitions.datasets.synthetic import Downloaded, in_place


@dataclass(frozen=True)
class Config(Downloaded):
    """Settings of the data set."""

    repository: str | None
    subset: str | None
    train_split: str
    test_split: str | None
    image_column: str
    label_column: str
    owner_column: str | None
    grayscale: bool
    image_size: Annotated[int, Range(ge=8)] | None
    classes: tuple[Annotated[int, Range(ge=0)], ...] | None
    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


def check(config: Config, name: str) -> None:
    """Raise ``UserError`` if the data are not below ``root`` and must not be downloaded. Opens no file."""
    if config.repository is None:
        raise UserError(f"dataset={name}: it needs a name. Fix: dataset.repository=NAME, such as uoft-cs/cifar10, or a folder")
    if not config.download and config.path is None and not _at_hand(config):
        raise _absent(config, name, "not found, and dataset.download is false")


def _at_hand(config: Config) -> bool:
    if Path(_resolve_repository(config)).is_dir():
        return True
    # The library writes FashionMNIST as fashion_mnist. A failed download leaves folders without a table.
    plain = [
        path
        for path in _cache(config).glob("*")
        if _plain(path.name) == _plain(_resolve_repository(config).replace("/", "___"))
    ]
    return any(any(path.rglob("*.arrow")) for path in plain)


def _resolve_repository(config: Config) -> str:
    """Return the repository's name, or the folder that replaces it."""
    return os.path.expanduser(str(config.repository))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def load(config: Config, name: str) -> ImageData:
    """Return the data set's published splits, or a stratified test split if none is published.

    A cached copy is used without asking the hub.

    Raises:
        UserError: If the data are not available.
    """
    classes = None if config.classes is None else len(config.classes)
    if (data := in_place(config, name, _at_hand(config), classes)) is not None:
        return data
    try:
        return images(config, _splits(config, offline=True))
    except UserError:
        raise
    except Exception as error:  # the libraries have no single exception for "not cached"
        if Path(_resolve_repository(config)).is_dir():
            raise UserError(
                f"dataset.repository: the folder {config.repository} cannot be read: {_format_error(error)}"
            ) from error
        if not config.download:
            raise _absent(config, name, "not found, and dataset.download is false") from error
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT):
        raise _absent(config, name, "not found, and no network to download it")
    print(f"downloading {name} into {_cache(config)}", flush=True)
    try:
        return images(config, _splits(config, offline=False))
    except UserError:
        raise
    except Exception as error:
        raise _absent(config, name, f"the download failed ({_format_error(error)})") from error


def images(config: Config, splits: list[Any]) -> ImageData:
    """Return one or two tables as ``ImageData``, with rows of a PIL image, a label and optionally an owner.

    ``classes`` selects published labels, and numbers them from 0 in its order. Labels that are names follow their own order.

    Raises:
        UserError: If a column does not exist, images have several sizes, labels are missing or do not start from 0, or a class
            has no image.
    """
    mode, kept = "L" if config.grayscale else "RGB", config.classes
    for key in ("image_column", "label_column", "owner_column"):
        column, there = getattr(config, key), splits[0].column_names
        if column is not None and column not in there:
            raise unknown(f"dataset.{key}", column, there)
    if kept is not None:
        splits = [table.select(np.flatnonzero(np.isin(_column([table], config.label_column), kept))) for table in splits]
    y, where = _column(splits, config.label_column), f"dataset.label_column={config.label_column}"
    names = tuple(map(str, getattr(splits[0].features[config.label_column], "names", None) or ()))
    if y.dtype.kind == "b":
        found, y = np.unique(y, return_inverse=True)
        names = tuple(map(str, found))
    if kept is None:
        y, texts = number_labels(y, where, "dataset.classes=[...] keeps the labels that it lists")
        names = texts or names
    else:
        if len(set(kept)) < len(kept) or set(kept) - set(y.tolist()):
            raise UserError(f"dataset.classes must name labels that images have, each once, got {list(kept)}")
        y = (y[:, None] == np.array(kept)).argmax(1)
        names = tuple(names[label] for label in kept) if names else ()
    check_labels(y, where, "dataset.classes=[...] numbers those that it lists from 0")
    loaded = Loaded(names)
    x = _pixels(config, mode, splits, loaded)
    owner = None
    if config.owner_column is not None:
        owner = _column(splits, config.owner_column)
        check_owners(owner, f"dataset.owner_column={config.owner_column}")
        owner = np.unique(owner, return_inverse=True)[1]
    if len(splits) == 2:
        test = np.repeat([False, True], [len(table) for table in splits])
    else:
        test = stratified_split(y, config.test_fraction, config.split_seed)
    return make_images(x, y, test, owner=owner, loaded=loaded)


def _pixels(config: Config, mode: str, splits: list[Any], loaded: Loaded) -> np.ndarray:
    """Return the images (N,H,W[,3]) as uint8.

    Raises:
        UserError: If images have several sizes, or a value is not an image.
    """
    size, images = config.image_size, []
    for table in splits:
        for row in table:
            image = row[config.image_column]
            if not hasattr(image, "convert"):
                raise UserError(f"dataset.image_column={config.image_column} holds {type(image).__name__}, no images")
            check_depth(image, f"dataset.repository={config.repository}")
            image = convert_image(image, mode, loaded.converted)
            images.append(np.asarray(image if size is None else image.resize((size, size))))
    if len(sizes := {image.shape[:2] for image in images}) > 1:
        found = ", ".join("x".join(map(str, shape)) for shape in sorted(sizes)[:3])
        raise UserError(
            f"dataset.repository={config.repository} has images of several sizes ({found}, ...): set dataset.image_size"
        )
    return np.stack(images)


def _column(splits: list[Any], name: str) -> np.ndarray:
    return np.concatenate([np.asarray(table[name][:]) for table in splits])


def _splits(config: Config, offline: bool) -> list[Any]:
    """Return the tables of train and of test, if there is one, in their published order."""
    from flwr_datasets import FederatedDataset

    names = [config.train_split] + ([config.test_split] if config.test_split else [])
    with _library(offline):
        # One partition each, because Contrafed draws the partitions itself, equally for every method and engine.
        source = FederatedDataset(
            dataset=_resolve_repository(config),
            subset=config.subset,
            partitioners=dict.fromkeys(names, 1),
            shuffle=False,
            cache_dir=str(_cache(config)),
        )
        return [source.load_split(name) for name in names]


@contextlib.contextmanager
def _library(offline: bool) -> Iterator[None]:
    """Silence the libraries and, if ``offline``, keep them from asking the hub. Restore their settings on exit."""
    import datasets
    from huggingface_hub import constants

    switches = (datasets.config, "HF_HUB_OFFLINE"), (constants, "HF_HUB_OFFLINE")
    before = [getattr(module, name) for module, name in switches]
    bars, level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        if offline:
            for module, name in switches:
                setattr(module, name, True)
        yield
    finally:
        for (module, name), value in zip(switches, before, strict=True):
            setattr(module, name, value)
        datasets.logging.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _cache(config: Config) -> Path:
    return Path(config.root).expanduser() / "hub"


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _absent(config: Config, name: str, why: str) -> UserError:
    return UserError(
        f"dataset={name}: {why}. Fix: run once with a network, or put the cache of '{config.repository}' into "
        f"{_cache(config)}, or give the images as dataset=npz or dataset=folder"
    )
