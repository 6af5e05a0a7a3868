"""MNIST, Fashion-MNIST, EMNIST (balanced), CIFAR-10, CIFAR-100 and SVHN through torchvision."""

import contextlib
import io
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.images import ImageData, make_images
from contrafed.partitions.datasets.network import reachable
from contrafed.partitions.datasets.synthetic import Downloaded, in_place

# torchvision's class, and the paths that it needs below dataset.root.
SETS = {
    "mnist": ("MNIST", ("MNIST/raw",)),
    "fashion_mnist": ("FashionMNIST", ("FashionMNIST/raw",)),
    "emnist": ("EMNIST", ("EMNIST/raw",)),
    "cifar10": ("CIFAR10", ("cifar-10-batches-py",)),
    "cifar100": ("CIFAR100", ("cifar-100-python",)),
    "svhn": ("SVHN", ("train_32x32.mat", "test_32x32.mat")),
}

# Seconds without a byte after which a download fails.
MAX_SILENT_SECONDS = 20.0


@dataclass(frozen=True)
class Config(Downloaded):
    """Settings of the data set."""


def check(config: Config, name: str) -> None:
    """Raise ``UserError`` if the data are not below ``root`` and must not be downloaded. Opens no file."""
    if not config.download and config.path is None and not _at_hand(config, name):
        raise _absent(config, name)


def _at_hand(config: Config, name: str) -> bool:
    # A failed download leaves an empty folder.
    places = [Path(config.root).expanduser() / place for place in SETS[name][1]]
    return all(place.is_file() or (place.is_dir() and any(place.iterdir())) for place in places)


def load(config: Config, name: str) -> ImageData:
    """Return train and test images as published, and download them if needed and allowed.

    Raises:
        UserError: If the data are not available.
    """
    if (data := in_place(config, name, _at_hand(config, name))) is not None:
        return data
    train, test = (_open(config, name, part) for part in ("train", "test"))
    (x, y), (x_test, y_test) = arrays(train, name), arrays(test, name)
    split = np.repeat([False, True], [len(y), len(y_test)])
    return make_images(np.concatenate([x, x_test]), np.concatenate([y, y_test]), split)


def arrays(part: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one torchvision data set as images (N,H,W[,C]) uint8 and labels (N,)."""
    x = np.asarray(part.data)
    y = np.asarray(part.labels if name == "svhn" else part.targets).astype(np.int64)
    if name == "svhn":
        x = x.transpose(0, 2, 3, 1)  # stored with channels first
    if name == "emnist":
        x = x.swapaxes(1, 2)  # stored transposed
    return x, y


def _open(config: Config, name: str, part: str) -> Any:
    from torchvision import datasets

    root = Path(config.root).expanduser()
    which: dict[str, Any] = {"split": part} if name == "svhn" else {"train": part == "train"}
    make = getattr(datasets, SETS[name][0])
    if name == "emnist":
        which["split"] = "balanced"
    try:
        return make(str(root), **which)
    except Exception as error:  # parsers raise many types for a damaged file
        if "Dataset not found" not in str(error):
            raise UserError(
                f"dataset={name}: {_join_folders(name)} in {root} cannot be read ({type(error).__name__}). "
                "Fix: remove them and run again"
            ) from error
        if not config.download:
            raise _absent(config, name) from None
    if not any(reachable(url) for url in _addresses(make)):
        raise UserError(
            f"dataset={name}: not found or incomplete, and no network to download it. "
            f"Fix: put {_join_folders(name)} into {root}, or name an npz of the same classes (dataset.path=FILE.npz)"
        )
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(MAX_SILENT_SECONDS)
    print(f"downloading {name} into {root}", flush=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            root.mkdir(parents=True, exist_ok=True)
            return make(str(root), download=True, **which)
    except Exception as error:
        raise UserError(
            f"dataset={name}: the download failed ({type(error).__name__}). "
            f"Fix: put {_join_folders(name)} into {root} and run again"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def _addresses(make: Any) -> list[str]:
    """Return the addresses from which torchvision downloads a data set."""
    if hasattr(make, "url"):  # before the mirrors, because EMNIST inherits MNIST's but has its own address
        return [make.url]
    if hasattr(make, "mirrors"):
        return list(make.mirrors)
    return [make.split_list["train"][0]]


def _join_folders(name: str) -> str:
    return " and ".join(SETS[name][1])


def _absent(config: Config, name: str) -> UserError:
    root = Path(config.root).expanduser()
    return UserError(
        f"dataset={name}: not found or incomplete. Fix: put {_join_folders(name)} into {root}, or dataset.download=true"
    )
