"""Keep a run alive after the reader of standard output or standard error is gone."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Outliving:
    """A text stream that discards its text once it cannot be written: its reader is gone, or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        if isinstance(stream, io.TextIOWrapper):  # a name that the terminal cannot show is escaped
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._alone():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._alone():
            self._stream.flush()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # this also discards what is still buffered when the process ends
            os.close(nowhere)
            if not isinstance(error, BrokenPipeError):
                with contextlib.suppress(OSError):
                    print(f"output: cannot be written ({error.strerror}); the run continues without it", file=sys.stderr)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Let printing never fail within the block and at the end of the process, without a reader or with a full disk.

    So ``| head`` does not stop a run. Ctrl-C also ends ``tee``, and the run still writes everything.
    """
    _fill_closed()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Outliving(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _fill_closed() -> None:
    """Open what a process was started without (``>&-``): else the next file would take its place, and get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115  for the process
