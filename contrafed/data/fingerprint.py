"""The fingerprints of a run's files: they tell whether a run that is resumed or repeated has the files of before."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contrafed.core.client_run import Choice
from contrafed.core.disk import checksum

MAX_PIXEL_BYTES = 1 << 26  # of larger data sets evenly chosen images count
LENGTH = 16  # hexadecimal digits of a fingerprint


def fingerprint_images(data: Any) -> str:
    """Return a checksum of ``ImageData``: shape, all labels, the splits, the owners and the pixels of a sample."""
    x, splits = data.x, [data.test, *([] if data.validation is None else [data.validation])]
    found = hashlib.sha256(repr((tuple(x.shape), data.num_classes)).encode())
    for part in (data.y.numpy(), *(split.numpy() for split in splits), *([] if data.owner is None else [data.owner])):
        part = np.array(list(map(str, part))) if part.dtype.kind == "O" else part  # objects are pointers
        found.update(part.tobytes())
    step = max(1, -(-x.nbytes // MAX_PIXEL_BYTES))
    found.update(x[::step].contiguous(memory_format=torch.contiguous_format).numpy().data)
    return found.hexdigest()[:LENGTH]


def fingerprint_run(images: str, *choices: Choice) -> str:
    """Return the fingerprint of a run: of its ``images``, and of the files of its partition, participation and clock.

    A module's ``REVISION`` counts too. It changes if the same settings give other examples than before.
    """
    paths = [getattr(choice.config, "path", None) for choice in choices]
    files = [Path(path).expanduser() for path in paths if isinstance(path, str)]
    contents = [file.read_bytes() for file in files if file.is_file()]
    contents += [f"{choice.name} {choice.module.REVISION}".encode() for choice in choices if hasattr(choice.module, "REVISION")]
    if not contents:
        return images
    return hashlib.sha256(b"\n".join([images.encode(), *contents])).hexdigest()[:LENGTH]


def fingerprint_weights(init_from: str | None, model: Choice) -> dict[str, str]:
    """Return the fingerprints of a run's files of initial weights, by key. A file that is not there has none."""
    paths = {"init_from": init_from, "model.pretrained": model.values.get("pretrained")}
    files = {key: Path(path).expanduser() for key, path in paths.items() if path is not None}
    return {key: checksum(file)[:LENGTH] for key, file in files.items() if file.is_file()}


def find_changed_weights(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the key of a file of initial weights that changed, empty if none did. An older run has no fingerprints."""
    return next((key for key, found in now.items() if before.get(key, found) != found), "")
