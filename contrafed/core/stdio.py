"""Keep a run alive after the reader of standard output or standard error is gone."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Outliving:
    """A text stream that discards its text once the reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

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
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # this also discards what is still buffered when the process ends
            os.close(nowhere)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Ignore closed pipes within the block and at the end of the process.

    So ``| head`` does not stop a run. Ctrl-C also ends ``tee``, and the run still writes everything.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Outliving(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
