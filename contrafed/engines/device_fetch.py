"""Fetch replies of devices from the SuperLink piece by piece, up to a limit of bytes."""

import sys
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

# Seconds without a new piece after which the upload of a reply has failed. Flower's pieces have at most 5 MB.
MAX_PAUSE_SECONDS = 600.0


class IncompleteReplyError(Exception):
    """The SuperLink has a reply's message, and not yet all of its pieces."""


@dataclass
class _Reply:
    """What was fetched of one reply."""

    changed: float  # time of the last new piece
    answer: Any = None  # the SuperLink's answer with the reply's message, which it gives only once
    pieces: dict[str, Any] = field(default_factory=dict)  # by Flower's object id
    size: int = 0  # bytes


class ReplyFetcher:
    """Keeps the fetched pieces of a reply, so that Flower's ``pull_messages`` can be called again for the same reply.

    Flower's Grid alone waits for a missing piece. It loses the reply if the SuperLink answers with an error between two pieces.
    """

    def __init__(self, client: Any) -> None:
        """Fetch through ``client``, the HTTP client of Flower's Grid."""
        # Largest bytes of a reply. A client may send any number, and Flower would hold them four times.
        self.limit = sys.maxsize
        self.replies: dict[str, _Reply] = {}  # by the id of the message that they answer
        self.current: _Reply | None = None
        self.lock = threading.Lock()
        self.pull_messages, self.pull_object = client.PullMessages, client.PullObject
        self.confirm = client.ConfirmMessageReceived
        client.PullMessages, client.PullObject = self._pull_messages, self._pull_object
        client.ConfirmMessageReceived = self._confirm

    def open(self, identifier: str) -> None:
        """Fetch the reply to a message from now on."""
        self.current = self.replies.setdefault(identifier, _Reply(time.monotonic()))

    def has_stopped(self, identifier: str) -> bool:
        """Return whether the upload of a reply has made no progress for ``MAX_PAUSE_SECONDS``."""
        return time.monotonic() - self.replies[identifier].changed >= MAX_PAUSE_SECONDS

    def close(self, identifier: str) -> None:
        """Forget the pieces of a reply."""
        self.replies.pop(identifier, None)
        self.current = None

    def clear(self) -> None:
        """Forget the pieces of all replies, because no further ones are waited for."""
        self.replies.clear()
        self.current = None

    def _pull_messages(self, request: Any) -> Any:
        reply = self.current
        if reply is None or reply.answer is not None:
            return self.pull_messages(request) if reply is None else reply.answer
        answer = self.pull_messages(request)
        if answer.messages_list:
            reply.answer, reply.changed = answer, time.monotonic()
        return answer

    def _pull_object(self, request: Any) -> Any:
        reply = self.current  # Flower calls this in two threads
        if reply is None:
            return self.pull_object(request)
        if request.object_id in reply.pieces:
            return reply.pieces[request.object_id]
        found = self.pull_object(request)
        if not found.object_found:
            return found
        if not found.object_available:
            raise IncompleteReplyError
        content = found.object_content
        with self.lock:
            if request.object_id not in reply.pieces:  # fetched by the thread of an earlier attempt
                reply.size += len(content)
                if reply.size > self.limit:
                    raise ValueError(f"it has more than {self.limit} bytes")
                piece = SimpleNamespace(object_found=True, object_available=True, object_content=content)
                reply.pieces[request.object_id], reply.changed = piece, time.monotonic()
            return reply.pieces[request.object_id]

    def _confirm(self, request: Any) -> Any:
        found = self.confirm(request)
        if self.current is not None:
            self.current.pieces.clear()  # Flower decodes its own copy
        return found
