"""Asking whether a server answers before a library begins its long retries."""

import threading
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

# Seconds to wait for an answer, the look-up of the name included.
PATIENCE = 8.0


def reachable(url: str) -> bool:
    """Return whether the server of ``url`` answers at all, through the proxy of the environment, within ``PATIENCE`` s."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=PATIENCE).close()
        except HTTPError:
            pass  # a refusal is an answer too
        except (OSError, HTTPException):
            return
        answered.set()

    # A thread, because no timeout bounds the look-up of a name.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answered.is_set()
