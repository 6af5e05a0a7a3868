"""Find personal models of a run whose clients are all on this machine: a subfolder of the run's folder."""

import os
import shutil
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from contrafed.client_app.files import best_folder, personal_file, shapes_in
from contrafed.core.disk import copy_private, sync
from contrafed.core.errors import UserError
from contrafed.training.workspace import Workspace

FOLDER = "personal"
BEST_FOLDER = best_folder(FOLDER)  # in a run's folder, and in its checkpoints


def place_in(folder: Path) -> str:
    """Return the folder of personal models for the run in ``folder``, as clients are told."""
    return str(folder.resolve() / FOLDER)


def check_saved(workspace: Workspace, place: str) -> None:
    """Raise ``UserError`` unless every client with held-out examples has a saved personal model of the right shapes."""
    partition, wanted = workspace.federation.partition, {n: tuple(v.shape) for n, v in workspace.initial.items()}
    for client in np.flatnonzero(partition.test_sizes + partition.validation_sizes).tolist():
        try:
            found = shapes_in(place, client)
        except FileNotFoundError as error:
            raise UserError(
                f"there is no personal model of client {client} in {place}; the run needs save_personal=true"
            ) from error
        except SafetensorError as error:
            raise UserError(f"{personal_file(place, client)} is no safetensors file ({error})") from error
        if found != wanted:
            raise UserError(f"{personal_file(place, client)} does not fit the model of this configuration")


def keep_best(folder: Path, checkpoint: Path) -> None:
    """Keep the models of the best evaluation in a new checkpoint's folder. They are links, because files are only replaced."""
    if not (folder / BEST_FOLDER).is_dir():
        return
    kept = checkpoint / BEST_FOLDER
    kept.mkdir()
    for file in (folder / BEST_FOLDER).glob("*.safetensors"):
        try:
            os.link(file, kept / file.name)
        except OSError:  # a file system without links
            copy_private(file, kept / file.name)
            sync(kept / file.name)
    sync(kept)


def restore_best(folder: Path, checkpoint: Path) -> None:
    """Restore the models of the best evaluation from a checkpoint's folder, as copies, if it has any."""
    if (checkpoint / BEST_FOLDER).is_dir():
        shutil.rmtree(folder / BEST_FOLDER, ignore_errors=True)
        shutil.copytree(checkpoint / BEST_FOLDER, folder / BEST_FOLDER, copy_function=copy_private)
