"""Check whether a server replies before a library starts its long retries."""

import threading
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

# Seconds to wait for a reply, with the look-up of the name.
MAX_ANSWER_SECONDS = 8.0


def reachable(url: str) -> bool:
    """Return whether the server of ``url`` replies within ``MAX_ANSWER_SECONDS`` seconds, through the environment's proxy."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=MAX_ANSWER_SECONDS).close()
        except HTTPError:
            pass  # a refusal is a reply too
        except (OSError, HTTPException):
            return
        answered.set()

    # Use a thread, because no timeout bounds the look-up of a name.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(MAX_ANSWER_SECONDS)
    return answered.is_set()
