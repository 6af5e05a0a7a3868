"""Limit the time of a reply if no setting limits it."""

from flwr.app import DEFAULT_TTL, Error, Message
from flwr.common.constant import ErrorCode

# Seconds that a reply may take if engine.round_timeout is null. Flower accepts no reply to an older message.
MAX_REPLY_SECONDS = float(DEFAULT_TTL)
# Seconds that a client may take to answer a query if wait_for_clients is null. Then it is asked again.
MAX_QUERY_SECONDS = 3600.0


def failed_reply(message: Message, reason: str) -> Message:
    """Return a failed reply to ``message``."""
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def late_reply(message: Message) -> Message:
    """Return a failed reply to a message without an answer in ``MAX_REPLY_SECONDS``."""
    return failed_reply(message, f"no reply within {MAX_REPLY_SECONDS:g} s")
