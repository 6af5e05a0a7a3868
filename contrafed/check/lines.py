"""Find an author's line: the first one after which something changed, or the one that anomaly mode names."""

import contextlib
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from contrafed.core.registry import short_place

PACKAGE = Path(__file__).resolve().parent.parent
# Code that methods call. A mistake is not there, also if it shows there.
TOOLS = tuple(
    PACKAGE / room for room in ("core", "data", "training", "client_app", "server", "engines", "config", "runs", "check")
)
LIBRARY = Path(inspect.__file__).parent  # Python's own


class Author:
    """The files of an author: those of some classes and modules, and others in the same folders outside of Contrafed."""

    def __init__(self, parts: Iterable[Any]) -> None:
        """Collect the files of classes and modules. Those of libraries and of the framework are left out."""
        self.files, self.folders, self._known = set[str](), set[Path](), dict[str, bool]()
        for part in parts:
            file = _file_of(part)
            if file and not _is_foreign(Path(file)):
                self.files.add(file)
                if not Path(file).is_relative_to(PACKAGE.parent / "clients") and PACKAGE not in Path(file).parents:
                    self.folders.add(Path(file).parent)

    def wrote(self, file: str) -> bool:
        """Return whether a file is the author's."""
        if file not in self._known:
            path = Path(file)
            self._known[file] = file in self.files or (path.parent in self.folders and not _is_foreign(path))
        return self._known[file]

    def find_line(self, error: BaseException) -> str:
        """Return the author's innermost line of an error, empty if there is none."""
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if self.wrote(frame.filename)]
        return short_place(frames[-1].filename, frames[-1].lineno) if frames else ""


def _file_of(part: Any) -> str:
    try:
        return inspect.getfile(part)
    except (TypeError, OSError):  # of a class that a notebook's cell defines, or a builtin
        return ""


def _is_foreign(path: Path) -> bool:
    return "site-packages" in path.parts or any(path.is_relative_to(tool) for tool in (*TOOLS, LIBRARY))


def first_change(author: Author, probe: Callable[[], Any], call: Callable[[], Any]) -> str:
    """Call a function, and return the author's first line after which ``probe()`` differs. It is empty if none does.

    A change by a library is the author's line that called it. Errors of the call are dropped.
    """
    before, place, last = probe(), "", dict[int, int]()

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal place
        if not place and probe() != before:
            place = short_place(frame.f_code.co_filename, last.get(id(frame), frame.f_lineno))
        last[id(frame)] = frame.f_lineno
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return local(frame, event, argument) if author.wrote(frame.f_code.co_filename) else None

    tracing = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Exception:  # reported by the check that the work runs at all
        return place
    finally:
        sys.settrace(tracing)
    return place


def anomalous_line(author: Author, call: Callable[[], Any]) -> str:
    """Call a function in torch's anomaly mode, and return the author's line whose result an in-place edit spoilt."""
    with warnings.catch_warnings(record=True) as found, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):
            call()
    for warning in found:
        frames = re.findall(r'File "([^"]+)", line (\d+)', str(warning.message))
        own = [(file, int(line)) for file, line in frames if author.wrote(file)]
        if own:
            return short_place(*own[-1])
    return ""


def place_of(function: Any) -> str:
    """Return file and first line of a function or class, empty if they are unknown."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    try:
        return short_place(inspect.getfile(function), inspect.getsourcelines(function)[1])
    except (TypeError, OSError):
        return ""
