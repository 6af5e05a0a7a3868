"""Buffers of the global model. No strategy sees them: they are averaged here, apart from the parameters."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from contrafed.core.tensors import Tensors
from contrafed.server.replies import Replies, Reply

COUNTER = "num_batches_tracked"  # BatchNorm's name


def leave_out(model: Tensors, buffers: Collection[str]) -> Tensors:
    """Return the parameters of a model, in a dictionary that a strategy may change."""
    return {name: value for name, value in model.items() if name not in buffers}


def are_sent(strategy: Any) -> bool:
    """Return whether clients upload buffers."""
    return any(name.partition("/")[2] in strategy.buffers for name in strategy.upload_spec)


def list_counters(buffers: Collection[str]) -> frozenset[str]:
    """Return BatchNorm's numbers of steps among a model's buffers. No norm includes them, since they grow with the rounds."""
    return frozenset(name for name in buffers if name.endswith(COUNTER))


def split_replies(replies: Replies, buffers: Collection[str]) -> tuple[Replies, Replies]:
    """Return the same replies with parameters and all else alone, and with buffers alone."""
    pairs = [_split(reply, buffers) for reply in replies]
    return tuple(Replies(side, replies.aggregation) for side in zip(*pairs, strict=True)) if pairs else (replies, replies)  # type: ignore[return-value]


def _split(reply: Reply, buffers: Collection[str]) -> tuple[Reply, Reply]:
    theirs = {name for name in reply.tensors if name.partition("/")[2] in buffers and name.startswith(("model/", "delta/"))}
    rest = {name: value for name, value in reply.tensors.items() if name not in theirs}
    return replace(reply, tensors=rest), replace(reply, tensors={name: reply.tensors[name] for name in theirs})


def average_buffers(strategy: Any, replies: Replies) -> Tensors:
    """Return the mean of the buffers that clients sent, weighted by ``strategy.weights``. Counters are rounded."""
    if not len(replies) or not replies[0].tensors:
        return {}
    uniform = getattr(strategy.config, "weights", "samples") == "uniform"
    mean = replies.mean("model", np.ones(len(replies)) if uniform else replies.num_examples)
    return {name: value if value.dim() else value.round() for name, value in mean.items()}
