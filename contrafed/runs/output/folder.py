"""Claim a run's folder, which is never shared with another run."""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from contrafed.core.disk import unwritable
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_summary

# The process that creates this file owns the folder. The recorder then fills it with the run's configuration.
CLAIM = "config.yaml"

_here: set[Path] = set()  # the folders that this process holds


def give_up_folder(folder: Path) -> None:
    """Undo the claim of a run that a mistake ended before it began. Its file is still empty."""
    if (folder / CLAIM).exists() and not (folder / CLAIM).stat().st_size:
        (folder / CLAIM).unlink()
        if not any(folder.iterdir()):
            folder.rmdir()


def number_names(name: str) -> Iterator[str]:
    """Yield a name, then NAME-2, NAME-3 and so on, for names that are in use."""
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def list_unclaimed(path: Path) -> Iterator[Path]:
    """Yield the folders of this name, and its numbered versions, that no run has claimed."""
    return (folder for folder in map(path.with_name, number_names(path.name)) if not (folder / CLAIM).exists())


def make_new_folder(path: Path) -> Path:
    """Create ``path``, or its first numbered version that does not exist, and return it. Raises ``UserError``."""
    make_folder(path.parent)
    for folder in map(path.with_name, number_names(path.name)):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(folder, error) from error
        return folder
    raise AssertionError("unreachable")


def taken_by_a_run(folder: Path) -> UserError:
    """Return the error for a folder that already holds a run."""
    return UserError(f"output_dir: {folder} already holds a run. Fix: another output_dir, or move the run away")


def held_by_another(folder: Path) -> UserError:
    """Return the error for a folder in which another process writes."""
    return UserError(f"output_dir: another process writes in {folder}. Fix: another output_dir, or wait for it")


def claim_folder(path: Path, unique: bool) -> Path:
    """Create ``path`` and claim it for one run, and return the claimed folder.

    Creating the marker file exclusively is the claim, so only one of several simultaneous runs gets it.

    Args:
        path: The folder.
        unique: Use ``path-2``, ``path-3`` and so on if the folder is in use, instead of raising ``UserError``.

    Raises:
        UserError: If the folder cannot be written, or if it contains a sweep's runs, which reports would no longer find.
    """
    if path.name in ("", ".."):  # a relative path such as "." has no name to number
        path = path.resolve()
    for name in number_names(path.name):
        folder = path.parent / name
        if below := next(folder.glob(f"*/{CLAIM}"), None):
            if unique:
                continue
            raise UserError(f"output_dir: {folder} has the run {below.parent.name} below it. Fix: another output_dir")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / CLAIM).touch(exist_ok=False)
        except FileExistsError:
            if not folder.is_dir():
                raise UserError(f"output_dir: {folder} is a file, not a folder. Fix: another output_dir") from None
            if not unique:
                raise taken_by_a_run(folder) from None
        except OSError as error:
            raise unwritable(folder, error) from error
        else:
            if not unique or not is_held_elsewhere(folder):
                return folder
            give_up_folder(folder)  # another process holds it, and is about to claim it
    raise AssertionError("unreachable")


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[bool]:
    """Hold a run's folder for this process, which may already hold it. Yields False if another process does."""
    place = folder.resolve()
    if place in _here:
        yield True
        return
    new, free = [path for path in (folder, *folder.parents) if not path.exists()], True
    make_folder(folder)
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks
            pass
        if free:
            _here.add(place)
        yield free
    finally:
        if free:
            _here.discard(place)
        os.close(handle)
        if free:
            with contextlib.suppress(OSError):  # empty after a mistake in the data
                for path in filter(Path.exists, new):
                    path.rmdir()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a claimed folder during a block, and undo an unused claim if the block fails. Raises ``UserError`` if it is in
    use.
    """
    with hold_folder(folder) as free:
        try:
            if not free:
                raise held_by_another(folder)
            yield
        except BaseException:  # also Ctrl-C while an engine starts, or a missing client
            give_up_folder(folder)
            raise


def is_held_elsewhere(folder: Path) -> bool:
    """Return whether another process holds a run's folder."""
    with hold_folder(folder) as free:
        return not free


def make_folder(folder: Path) -> None:
    """Create a folder. Raises ``UserError`` if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def read_finished_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a run that ended with its last round, None for any other folder. It may have diverged there."""
    summary = read_summary(folder)
    if summary is None:
        return None
    whole = summary.get("status") == "diverged" and summary.get("rounds") == summary.get("num_rounds")
    return summary if whole or summary.get("status") == "finished" else None
