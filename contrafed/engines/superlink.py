"""Call Flower's Grid of a deployment again while its SuperLink does not answer."""

import copy
import time
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
from flwr.supercore.retry import make_simple_http_retry_invoker

from contrafed.core.errors import RunStopped

T = TypeVar("T")

# Seconds that the SuperLink may be silent before the run ends.
MAX_SILENCE_SECONDS = 600.0
# Seconds between two calls of a SuperLink that answers with an error.
RETRY_SECONDS = 1.0
# Answers of a SuperLink that has ended this run.
ENDED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class SuperLink:
    """Calls of Flower's Grid, which by itself repeats them without end if nothing answers, and never after an error."""

    def __init__(self, grid: Any) -> None:
        """Limit the retries of ``grid``. Those of Flower's heartbeats and logs stay as they are."""
        self.silent_since: float | None = None  # time of the first failed call since the last answer
        self.retries: Any = None
        client: Any = getattr(grid, "_runtime_client", None)
        if getattr(client, "_retry_invoker", None) is not None:
            self.retries, own = make_simple_http_retry_invoker(), copy.copy(client)
            gives_up: Any = self.retries.should_giveup
            # Flower interrupts the process if the SuperLink has ended the run.
            self.retries.should_giveup = lambda error: _has_ended(error) or gives_up(error)
            own._retry_invoker = grid._retry_invoker = self.retries
            grid._client = own

    def ask(self, call: Callable[[], T], ends: float, otherwise: T) -> T:
        """Return the result of ``call``, or ``otherwise`` if the SuperLink does not answer before ``ends``.

        Args:
            call: A call of Flower's Grid. It may be repeated.
            ends: A time of ``time.monotonic``.
            otherwise: The result without an answer.

        Raises:
            RunStopped: If the SuperLink is silent for ``MAX_SILENCE_SECONDS``, or has ended the run.
        """
        while True:
            began = time.monotonic()
            if self.retries is not None:
                limit = min(ends, (self.silent_since or began) + MAX_SILENCE_SECONDS)
                self.retries.max_time = max(limit - began, 0.0)
            try:
                found = call()
            except httpx.HTTPError as error:
                self._check(error, began)
            else:
                self.silent_since = None
                return found
            if time.monotonic() >= ends:
                return otherwise
            time.sleep(RETRY_SECONDS)

    def _check(self, error: httpx.HTTPError, began: float) -> None:
        """Raise ``RunStopped`` if a failed call is the last one."""
        fix = "Fix: give the same flwr run again. With checkpoint_every and resume=latest it resumes"
        if _has_ended(error):
            reason = "by flwr stop, or because the SuperLink did not answer for a minute"
            raise RunStopped(f"the SuperLink has ended this run, {reason}. {fix}", "interrupted") from error
        if self.silent_since is None:
            self.silent_since = began
        if time.monotonic() - self.silent_since >= MAX_SILENCE_SECONDS:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise RunStopped(f"the SuperLink does not answer for {MAX_SILENCE_SECONDS:g} s ({said}). {fix}") from error


def _has_ended(error: Exception) -> bool:
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code in ENDED
