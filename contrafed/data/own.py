"""Load images that only one client has, on its own disk. No other client and no server sees them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import PACKAGES, ClientRun
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.data.images import ImageData
from contrafed.data.loaded import check_loaded
from contrafed.data.partition import Partition, held_out_fraction
from contrafed.data.stratified import cut_stratified


def facts_of(data: ImageData) -> dict[str, Any]:
    """Return what the run's model requires of examples: shape, number of classes, mean and std, and the kind unless images."""
    mean, std = list(data.mean), list(data.std)
    kind = {} if data.kind == "image" else {"kind": data.kind}
    return {"shape": list(data.x.shape[1:]), "num_classes": data.num_classes, "mean": mean, "std": std, **kind}


def adapt_to_run(data: ImageData, facts: Mapping[str, Any], where: str) -> ImageData:
    """Return ``data`` normalised as in the run.

    Raises:
        UserError: If the run's model does not accept them.
    """
    shape = list(data.x.shape[1:])
    if data.kind != (wanted := facts.get("kind", "image")):
        raise UserError(f"{where} has {data.inputs}; this run's model takes {wanted}")
    if shape != facts["shape"]:
        raise UserError(f"{where} has images of {_size(shape)}; this run's model takes {_size(facts['shape'])}")
    if data.num_classes != facts["num_classes"]:
        raise UserError(f"{where} has {data.num_classes} classes; this run has {facts['num_classes']}")
    return replace(data, mean=tuple(facts["mean"]), std=tuple(facts["std"]))


def own_images(run: ClientRun, client: int, place: str) -> tuple[ImageData, Partition]:
    """Load a client's own images. All of them belong to this client.

    The test part is the file's, or the share ``partition.test_fraction`` of each class. The validation part is the folder's
    ``val/``, or the share ``partition.validation_fraction`` of the training part. A folder has one subfolder per class of the
    run. It is empty for a class that the client does not have.

    Args:
        run: The client's part of the configuration.
        client: Partition id of the client.
        place: A file as for dataset=npz, or a folder as for dataset=folder.

    Raises:
        UserError: If the data cannot be read, or if this run's model does not accept them.
    """
    facts, path = run.images, Path(place).expanduser()
    assert facts is not None
    merged, normalize = run.dataset.config.merge_splits, run.dataset.config.normalize
    shared: dict[str, Any] = {"path": str(path), "merge_splits": merged, "fraction": 1.0, "normalize": normalize}
    shared["validation_fraction"] = 0.0  # of this client's own images it is partition.validation_fraction
    shared["split_seed"] = run.seed_of_federation
    shared["test_fraction"] = held_out_fraction(run.partition.config, merged)
    channels, height, width = facts["shape"]
    if not path.is_absolute() or not path.exists():  # Flower chooses the working folder of a message's process
        raise UserError(f"--node-config data must be the absolute path of a file or folder on this client, got {place}")
    if path.is_dir():
        if height != width:
            raise UserError(f"{path} is a folder, whose images become squares; this run's model takes {_size(facts['shape'])}")
        module = registry.find(PACKAGES["dataset"], "dataset", {"name": "folder"})
        config = module.Config(**shared, image_size=height, grayscale=channels == 1)
        data = module.load(config, "folder", allow_empty=True)
    else:
        module = registry.find(PACKAGES["dataset"], "dataset", {"name": "npz"})
        data = module.load(module.Config(**shared, num_classes=facts["num_classes"], kind=None), "npz")
        if (named := len(data.loaded.class_names)) not in (0, facts["num_classes"]):
            wanted = f"this run's model has {facts['num_classes']} classes"
            fix = f"Fix: number the labels 0..{facts['num_classes'] - 1} as all clients do"
            raise UserError(f"{path}: y has {named} names of classes, {wanted}. {fix}")
    data = adapt_to_run(data, facts, str(path))
    check_loaded(data, str(path))
    y, validation = data.y.numpy(), None if data.validation is None else np.flatnonzero(data.validation.numpy())
    train, fraction = np.flatnonzero(~data.held_out.numpy()), run.partition.config.validation_fraction
    if validation is None and fraction:
        rng = generator(run.seed_of_federation, "partition own validation", 0, client)
        train, validation = cut_stratified(train, y, fraction, rng)
    mine = [train, np.flatnonzero(data.test.numpy()), *([] if validation is None else [validation])]
    parts = [[part if k == client else part[:0] for k in range(run.num_clients)] for part in mine]
    return data, Partition(parts[0], parts[1], y, data.num_classes, *parts[2:])


def _size(shape: list[int]) -> str:
    return "x".join(map(str, shape)) + " (channels x height x width)"
