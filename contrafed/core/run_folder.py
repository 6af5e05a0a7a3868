"""Read what a run wrote to its folder, to resume it or to report it."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.core.errors import UserError


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration in a run's folder.

    Raises:
        UserError: If it cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    try:
        stored = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read {folder / 'config.yaml'} ({type(error).__name__})") from error
    if not isinstance(stored, dict):
        raise UserError(f"{folder / 'config.yaml'} is no run's configuration")
    return {str(key): value for key, value in stored.items()}
