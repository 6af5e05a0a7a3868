"""A limit on the norm of an upload relative to other uploads, against replies of an absurd size.

It is no defence: a reply below the limit may still ruin a run. See ``aggregation``.
"""

import math
from collections.abc import Collection, Iterable
from statistics import median

from contrafed.core.tensors import size_of
from contrafed.server.replies import Reply, norm_of
from contrafed.server.round_log import Round

TOO_LONG = "norm too large beside others"
# Norms that are kept, and how many accepted ones stand for themselves.
MAX_KEPT, MIN_KEPT = 100, 3
# The default of engine.max_norm_ratio in conf/engine. Under privacy=central it stands for no limit.
DEFAULT_RATIO = 1000


class NormLimit:
    """Accepts replies whose joint L2 norm is at most ``ratio`` times the median of recent accepted ones.

    Recent are the last ``MAX_KEPT``. While there are fewer than ``MIN_KEPT``, the median is that of the round's own replies.
    The norm is that of all that a client uploads, prototypes too, but no counters of BatchNorm. An upload no longer than what
    the client received passes.
    """

    def __init__(self, ratio: float | None, counters: Collection[str] = ()) -> None:
        """Limit norms.

        Args:
            ratio: None for no limit.
            counters: Names of the model's tensors that no norm includes.
        """
        self.ratio, self.counters = math.inf if ratio is None else ratio, counters
        self.recent: list[float] = []  # a checkpoint brings it back

    def accept(self, replies: Iterable[Reply]) -> tuple[list[Reply], list[Reply]]:
        """Return the replies that pass and those that do not, and keep the norms of the former."""
        replies = list(replies)
        known = self.recent if len(self.recent) >= MIN_KEPT else [reply.norm for reply in replies]
        typical = median(known) if known else 0.0
        limit = self.ratio * typical if typical else math.inf
        good: list[Reply] = []
        long: list[Reply] = []
        for reply in replies:
            passes = reply.norm <= limit or reply.norm <= norm_of(reply.received, self.counters)
            (good if passes else long).append(reply)
        # By partition id, so that the order of arrival counts for nothing.
        self.recent = [*self.recent, *(reply.norm for reply in sorted(good, key=lambda reply: reply.client))][-MAX_KEPT:]
        return good, long

    def filter(self, replies: Iterable[Reply], log: Round) -> list[Reply]:
        """Return the replies that pass, and reject the others in the round's log."""
        good, long = self.accept(replies)
        for reply in long:
            log.reject(reply.client, TOO_LONG)
            log.bytes_up -= size_of(reply.tensors)
        return good
