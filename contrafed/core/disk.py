"""Files that survive a loss of power, and a disk that takes no more."""

import contextlib
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from contrafed.core.errors import DiskError

# What a disk says that is full, read-only or broken, and that holds no file so large; a network's errors are others.
FAILING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


def sync(path: Path) -> None:
    """Return when what a file holds, or which names a folder has, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, by which it is known to be what was written."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def expanded(path: str | None) -> str | None:
    """Return a path in which ~ is the home folder: a shell leaves it as it is behind =."""
    return None if path is None else os.path.expanduser(path)


def replace(whole: Path, target: Path) -> None:
    """Have ``whole`` take the place of ``target``, on the disk before this returns: after a crash either is there, entire."""
    sync(whole)
    os.replace(whole, target)
    sync(target.parent)


@contextlib.contextmanager
def told_in_one_line(folder: Path, then: Callable[[], str]) -> Iterator[None]:
    """Raise ``DiskError`` where a disk fails to take what is written below ``folder``; ``then`` says what to do about it."""
    said = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        # TensorBoard's thread: whoever next writes through it hears of it.
        if getattr(args.exc_value, "errno", None) not in FAILING:
            said(args)

    threading.excepthook = quiet
    try:
        yield
    except OSError as error:
        gone = error.errno == errno.ENOENT and str(error.filename).startswith(str(folder))  # removed by another program
        if error.errno not in FAILING and not gone and folder.is_dir():
            raise
        raise DiskError(f"cannot write to {error.filename or folder} ({error.strerror}); {then()}") from error
    finally:
        threading.excepthook = said
