"""Find personal models of a run whose clients are all on this machine: a subfolder of the run's folder."""

from pathlib import Path

from safetensors import SafetensorError

from contrafed.client_app.files import personal_file, shapes_in
from contrafed.core.errors import UserError
from contrafed.training.workspace import Workspace

FOLDER = "personal"


def place_in(folder: Path) -> str:
    """Return the folder of personal models for the run in ``folder``, as clients are told."""
    return str(folder.resolve() / FOLDER)


def check_saved(workspace: Workspace, place: str) -> None:
    """Raise ``UserError`` unless every client with a test part has a saved personal model of the right shapes."""
    partition, wanted = workspace.federation.partition, {n: tuple(v.shape) for n, v in workspace.initial.items()}
    for client in range(workspace.federation.num_clients):
        if len(partition.test(client)) == 0:
            continue
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
