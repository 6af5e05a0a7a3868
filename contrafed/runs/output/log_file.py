"""A CSV log of a run: what was written to it, its checksum, and whether the file is still the one that was written."""

import contextlib
import hashlib
import os
from pathlib import Path

from contrafed.core.disk import replace
from contrafed.core.errors import RunStopped

DAMAGED = ".damaged"  # at the end of the name of a file that was put aside


class LogFile:
    """One log, open for the whole run. Its bytes can be read back, also if another program replaces or removes the file."""

    def __init__(self, path: Path, keep: int | None = None) -> None:
        """``keep``: how many bytes of a file that is there belong to the run. The rest is cut off. None begins a new file."""
        self.path, self.size, self._sum = path, 0, hashlib.sha256()
        self._failed = False  # a write failed, after which the size on the disk is not known
        self._lost = False  # another program emptied the file
        self._file = path.open("w+b" if keep is None else "r+b")
        if keep is not None:
            self._file.truncate(keep)
            while block := self._file.read(1 << 20):
                self._sum.update(block)
                self.size += len(block)

    @property
    def checksum(self) -> str:
        """The SHA-256 of all that was written."""
        return self._sum.hexdigest()

    def write(self, text: str) -> None:
        """Append text and flush it. Raises ``OSError``, and ``RunStopped`` if another program changed the file."""
        if not (self._failed or self._lost or self.is_whole()):
            self._lost = True
            raise RunStopped(self._explain())
        if self._lost:
            return
        content = text.encode()
        try:
            self._file.write(content)
            self._file.flush()
        except OSError:
            self._failed = True
            raise
        self._sum.update(content)
        self.size += len(content)

    def is_whole(self) -> bool:
        """Whether the path still names the file that was written, in its length."""
        here = os.fstat(self._file.fileno())
        return here.st_size == self.size and self._is_named(here)

    def find_folder(self) -> Path | None:
        """Return where the run's folder is now if it was renamed; None if it cannot be found (Linux alone tells)."""
        with contextlib.suppress(OSError):
            found = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}"))
            if found.exists() and found.parent != self.path.parent:
                return found.parent
        return None

    def restore(self, folder: Path) -> None:
        """Go on in ``folder``. A file that was removed or replaced is written again, and the other one put aside."""
        self.path, size = folder / self.path.name, os.fstat(self._file.fileno()).st_size
        if self._failed or size < self.size:
            return
        self._lost = False
        self._file.truncate(self.size)  # another program may have appended to it
        if self.is_whole():
            return
        if self.path.exists():
            os.replace(self.path, self.path.with_name(self.path.name + DAMAGED))
        self._file.seek(0)
        part = self.path.with_name(f".{self.path.name}.part")
        part.write_bytes(self._file.read(self.size))
        replace(part, self.path)
        self._file.close()
        self._file = self.path.open("r+b")
        self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _is_named(self, here: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), here)
        except OSError:
            return False

    def _explain(self) -> str:
        """Return the line on what happened to the file, and what can be done."""
        if not self.path.parent.is_dir():
            if (new := self.find_folder()) is not None:
                return f"output_dir: {self.path.parent} was renamed to {new}. Fix: resume=latest output_dir={new}"
            return (
                f"output_dir: {self.path.parent} was removed. Fix: begin the run again; its logs, model and summary are there"
            )
        what = f"output_dir: another program replaced, changed or removed {self.path}"
        if os.fstat(self._file.fileno()).st_size >= self.size:
            return f"{what}. Fix: resume=latest. The log is restored, and a file in its place now ends in {DAMAGED}"
        return f"{what}. Fix: begin the run in another folder, and open a copy of a log while its run continues"
