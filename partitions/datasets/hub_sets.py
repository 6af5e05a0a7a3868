"""CINIC-10, FEMNIST and Tiny-ImageNet through flwr-datasets."""

import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

import numpy as np

from contrafed.config import Range
from contrafed.errors import UserError
from partitions.images import ImageData, make_images, stratified_split

# Seconds to wait for the hub before going on with what is cached.
PATIENCE = 5.0


@dataclass(frozen=True)
class Config:
    """Settings of the data set."""

    repository: str
    train_split: str
    test_split: str | None
    image_column: str
    label_column: str
    owner_column: str | None
    grayscale: bool
    root: str
    download: bool
    test_fraction: Annotated[float, Range(gt=0, lt=1)]
    split_seed: Annotated[int, Range(ge=0)]


def load(config: Config, name: str) -> ImageData:
    """Return the data set's splits as published; without a test split a stratified one is drawn. Raises ``UserError``."""
    splits = [config.train_split] + ([config.test_split] if config.test_split else [])
    return images(config, [_fetch(config, name, split) for split in splits])


def images(config: Config, splits: list[Any]) -> ImageData:
    """Return one or two tables of rows with a PIL image, a label and perhaps an owner as ``ImageData``."""
    mode = "L" if config.grayscale else "RGB"
    x = np.stack([np.asarray(row[config.image_column].convert(mode)) for rows in splits for row in _rows(rows)])
    y = np.concatenate([np.asarray(rows[config.label_column]) for rows in splits]).astype(np.int64)
    owner = None
    if config.owner_column is not None:
        names = np.concatenate([np.asarray(rows[config.owner_column]) for rows in splits])
        owner = np.unique(names, return_inverse=True)[1]
    if len(splits) == 2:
        test = np.repeat([False, True], [len(rows) for rows in splits])
    else:
        test = stratified_split(y, config.test_fraction, config.split_seed)
    return make_images(x, y, test, owner=owner)


def _rows(table: Any) -> Iterable[Mapping[str, Any]]:
    return (table[i] for i in range(len(table)))


def _fetch(config: Config, name: str, split: str) -> Any:
    root = Path(config.root).expanduser()
    online = config.download and _reachable()
    if not online:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when the library is imported
    try:
        from flwr_datasets import FederatedDataset

        # One partition: partitioning is our own, so that every method and engine draws the same.
        source = FederatedDataset(dataset=config.repository, partitioners={split: 1}, cache_dir=str(root / "hub"))
        return source.load_split(split)
    except Exception as error:
        why = "the download failed" if online else "it is not cached, and the hub is not to be asked or does not answer"
        raise UserError(
            f"dataset={name}: {why} ({type(error).__name__}); run once with a network, or put the cache of "
            f"'{config.repository}' into {root / 'hub'}, or give the images as dataset=npz or dataset=folder"
        ) from error


def _reachable() -> bool:
    """Return whether the hub answers, so that without a network its client's long retries are spared."""
    from huggingface_hub import constants

    try:
        socket.create_connection((urlparse(constants.ENDPOINT).hostname, 443), timeout=PATIENCE).close()
    except OSError:
        return False
    return True
