"""What only one node has: images on the node's own disk, which no other node and no server ever sees."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import PACKAGES, NodeRun
from contrafed.core.errors import UserError
from contrafed.data.images import ImageData
from contrafed.data.partition import Partition, held_out_fraction


def facts_of(data: ImageData) -> dict[str, Any]:
    """Return what a run's model takes, for nodes: image shape (C, H, W), number of classes, mean and deviation by channel."""
    mean, std = list(data.mean), list(data.std)
    return {"shape": list(data.x.shape[1:]), "num_classes": data.num_classes, "mean": mean, "std": std}


def fitted(data: ImageData, facts: Mapping[str, Any], where: str) -> ImageData:
    """Return ``data`` normalised as the run says; raises ``UserError`` where the model does not take it."""
    shape = list(data.x.shape[1:])
    if shape != facts["shape"]:
        raise UserError(f"{where} has images of {_size(shape)}; this run's model takes {_size(facts['shape'])}")
    if data.num_classes != facts["num_classes"]:
        raise UserError(f"{where} has {data.num_classes} classes; this run has {facts['num_classes']}")
    return replace(data, mean=tuple(facts["mean"]), std=tuple(facts["std"]))


def own_images(run: NodeRun, node: int, place: str) -> tuple[ImageData, Partition]:
    """Return the images at ``place``, a file as dataset=npz or a folder as dataset=folder takes it, all of them ``node``'s.

    The test part is the file's own, or the share of each class that ``partition.test_fraction`` says. A folder has one
    folder per class of the run, an empty one for a class that the node does not hold.
    Raises ``UserError`` where there is nothing to read, or something that this run's model does not take.
    """
    facts, path = run.images, Path(place).expanduser()
    assert facts is not None
    merged, normalize = run.dataset.config.merge_splits, run.dataset.config.normalize
    shared: dict[str, Any] = {"path": str(path), "merge_splits": merged, "fraction": 1.0, "normalize": normalize}
    shared["split_seed"] = run.seed_of_federation
    shared["test_fraction"] = held_out_fraction(run.partition.config, merged)
    channels, height, width = facts["shape"]
    if not path.is_absolute() or not path.exists():  # Flower chooses the folder that a message's process runs in
        raise UserError(f"--node-config data must be the absolute path of a file or folder on this node, got {place}")
    if path.is_dir():
        if height != width:
            raise UserError(f"{path} is a folder, whose images become squares; this run's model takes {_size(facts['shape'])}")
        module = registry.find(PACKAGES["dataset"], "dataset", {"name": "folder"})
        config = module.Config(**shared, image_size=height, grayscale=channels == 1)
        data = module.load(config, "folder", allow_empty=True)
    else:
        module = registry.find(PACKAGES["dataset"], "dataset", {"name": "npz"})
        data = module.load(module.Config(**shared, num_classes=facts["num_classes"]), "npz")
    data = fitted(data, facts, str(path))
    mine = [np.flatnonzero(data.test.numpy() == held) for held in (False, True)]
    parts = [[part if k == node else part[:0] for k in range(run.num_nodes)] for part in mine]
    return data, Partition(parts[0], parts[1], data.y.numpy(), data.num_classes)


def class_names(place: str) -> list[str]:
    """Return the class names of a folder of images in the order of their labels; none for a file, whose labels are numbers."""
    path = Path(place).expanduser()
    if not path.is_dir():
        return []
    root = path / "train" if (path / "train").is_dir() else path
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir())


def _size(shape: list[int]) -> str:
    return "x".join(map(str, shape)) + " (channels x height x width)"
