"""The fingerprint of a run's data: it tells whether a run that is resumed or repeated has the data of before."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contrafed.core.client_run import Choice

MAX_PIXEL_BYTES = 1 << 26  # of larger data sets evenly chosen images count
LENGTH = 16  # hexadecimal digits of a fingerprint


def fingerprint_images(x: Tensor, y: Tensor, test: Tensor, owner: np.ndarray | None, num_classes: int) -> str:
    """Return a checksum of the images' shape, all labels, the test split, the owners and the pixels of a sample.

    Args:
        x: Images (N, C, H, W).
        y: Labels (N,).
        test: Whether an example belongs to the test part (N,).
        owner: The client that each example comes from (N,), None if unknown.
        num_classes: C.
    """
    found = hashlib.sha256(repr((tuple(x.shape), num_classes)).encode())
    for part in (y.numpy(), test.numpy(), *([] if owner is None else [owner])):
        found.update(part.tobytes())
    step = max(1, -(-x.nbytes // MAX_PIXEL_BYTES))
    found.update(x[::step].contiguous(memory_format=torch.contiguous_format).numpy().data)
    return found.hexdigest()[:LENGTH]


def fingerprint_run(images: str, partition: Choice, participation: Choice) -> str:
    """Return the fingerprint of a run: of its ``images``, and of the files of its partition and participation."""
    paths = [getattr(choice.config, "path", None) for choice in (partition, participation)]
    files = [Path(path).expanduser() for path in paths if isinstance(path, str)]
    contents = [file.read_bytes() for file in files if file.is_file()]
    if not contents:
        return images
    return hashlib.sha256(b"\n".join([images.encode(), *contents])).hexdigest()[:LENGTH]
