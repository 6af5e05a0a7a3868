"""Standard output and error that outlive whoever reads them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Outliving:
    """A text stream whose text goes nowhere from the moment on in which nobody reads it."""

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
            os.dup2(nowhere, self._stream.fileno())  # also what is in the buffer, at the end of the process
            os.close(nowhere)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Within the block, and at the end of the process, printing never fails because a reader is gone.

    So ``| head`` ends nothing but the reading, and Ctrl-C, which ends ``tee`` as well, still leaves what it leaves without it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Outliving(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
