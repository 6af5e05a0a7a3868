"""How long a reply may take where no setting says it."""

from flwr.app import DEFAULT_TTL, Error, Message
from flwr.common.constant import ErrorCode

# Seconds that a reply may take where engine.round_timeout is null. Flower accepts no reply to an older message.
MAX_REPLY_SECONDS = float(DEFAULT_TTL)
# Seconds that a client may take to say what it holds where wait_for_nodes is null. Then it is asked again.
MAX_QUERY_SECONDS = 3600.0


def failed_reply(message: Message, reason: str) -> Message:
    """Return a reply to ``message`` that counts as failed."""
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def late_reply(message: Message) -> Message:
    """Return a failed reply to a message that had none in ``MAX_REPLY_SECONDS``."""
    return failed_reply(message, f"no reply within {MAX_REPLY_SECONDS:g} s")
