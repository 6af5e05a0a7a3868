"""A run's own folder, never shared with another run."""

import itertools
from pathlib import Path

from core.errors import UserError

# Whoever creates this file owns the folder; the recorder then fills it with the run's configuration.
CLAIM = "config.yaml"


def give_up_folder(folder: Path) -> None:
    """Undo the claim of a run that a mistake ended before it began: no recorder has filled the claim yet."""
    if (folder / CLAIM).exists() and not (folder / CLAIM).stat().st_size:
        (folder / CLAIM).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def claim_folder(path: Path, unique: bool) -> Path:
    """Create ``path`` and claim it for one run; returns the folder that was claimed.

    ``unique``: a taken folder gives ``path-2``, ``path-3`` and so on; otherwise it raises ``UserError``, as does a folder
    that cannot be written. Creating the marker file exclusively is the claim, so of simultaneous runs only one gets it.
    """
    if path.name in ("", ".."):  # a relative path such as "." has no name to number
        path = path.resolve()
    for number in itertools.count(1):
        folder = path if number == 1 else path.parent / f"{path.name}-{number}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CLAIM).touch(exist_ok=False)
        except FileExistsError:
            if not folder.is_dir():
                raise UserError(f"output_dir: {folder} is a file, not a folder") from None
            if not unique:
                raise UserError(
                    f"output_dir: {folder} already holds a run; name another folder or move that one away"
                ) from None
        except OSError as error:
            raise UserError(f"output_dir: cannot write to {folder} ({error.strerror})") from error
        else:
            return folder
    raise AssertionError("unreachable")
