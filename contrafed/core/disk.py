"""Write files that survive a power failure, and report a failing disk and wrong paths."""

import contextlib
import errno
import hashlib
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from contrafed.core.errors import DiskError, UserError

# Errors of a disk that is full, read-only or broken, or that allows no file of this size. A network's errors are different.
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)


PRIVATE = 0o600  # of files that no other user may read
MAX_NAME_BYTES = 150  # of a name in UTF-8, to which an ending is added


def shorten_name(name: str) -> str:
    """Return a name of a file or folder. A long name is cut, and a checksum is added."""
    content = name.encode()
    if len(content) <= MAX_NAME_BYTES:
        return name
    return f"{content[:MAX_NAME_BYTES].decode(errors='ignore')}-{zlib.crc32(content):08x}"


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, by which it is known to be what was written."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def copy_private(source: str | Path, target: str | Path) -> Path:
    """Copy a file that no other user may read at any time, replace ``target``, and return its path."""
    new = Path(target)
    new.unlink(missing_ok=True)
    new.touch(PRIVATE, exist_ok=False)
    return Path(shutil.copyfile(source, new))


def expand_home(path: str | None) -> str | None:
    """Replace ~ by the home folder. A shell does not expand it after ``=``."""
    return None if path is None else os.path.expanduser(path)


def absent(key: str, path: str | Path, what: str = "no file") -> UserError:
    """Return the error for a key whose path is not there, with the whole path."""
    return UserError(f"{key}: there is {what} {Path(path).expanduser().absolute()}. Fix: check the path")


def unwritable(folder: str | Path, error: OSError) -> UserError:
    """Return the error for a run's folder that cannot be written to."""
    return UserError(f"output_dir: cannot write to {folder} ({error.strerror}). Fix: another output_dir")


def replace(whole: Path, target: Path) -> None:
    """Move ``whole`` to ``target``, and wait until that is on the disk.

    After a crash either the old or the new file is there, complete.
    """
    sync(whole)
    os.replace(whole, target)
    sync(target.parent)


@contextlib.contextmanager
def told_in_one_line(folder: Path, then: Callable[[], str]) -> Iterator[None]:
    """Raise ``DiskError`` if the disk fails while files are written below ``folder``.

    Args:
        folder: Folder that the error names if the failure has no file name.
        then: Returns the sentence about what to do next.
    """
    said = threading.excepthook

    def quiet(args: threading.ExceptHookArgs) -> None:
        # A thread of TensorBoard: the next write through it raises the error again.
        if getattr(args.exc_value, "errno", None) not in DISK_ERRNOS:
            said(args)

    threading.excepthook = quiet
    try:
        yield
    except OSError as error:
        gone = error.errno == errno.ENOENT and str(error.filename).startswith(str(folder))  # removed by another program
        if error.errno not in DISK_ERRNOS and not gone and folder.is_dir():
            raise
        raise DiskError(f"cannot write to {error.filename or folder} ({error.strerror}); {then()}") from error
    finally:
        threading.excepthook = said
