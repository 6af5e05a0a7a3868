"""Assign a round's messages to workers, in batches that keep all workers busy to the end."""

from collections.abc import Iterator, Sequence

import numpy as np
from flwr.app import Message, MessageType

from contrafed.core import codec

STACKED_MESSAGE_TYPES = (MessageType.TRAIN, MessageType.EVALUATE)  # messages that many clients may answer together


def cost_of(message: Message) -> float:
    """Return the amount of work of a message, in steps."""
    return max(float(codec.config_of(message).get("cost", 1)), 1.0)  # a client without steps still takes a moment


def cut_stacks(messages: Sequence[Message], rows: Sequence[int], size: int) -> list[list[int]]:
    """Cut the messages at ``rows`` into stacks of at most ``size`` of one kind, the largest clients first.

    Cutting some of these stacks again, in this order, gives the same stacks. So workers keep the stacks that they are handed.
    """
    stacks = []
    for kind in {messages[i].metadata.message_type: None for i in rows}:
        same = [i for i in rows if messages[i].metadata.message_type == kind]
        # Clients with similar amounts of work share a stack, so that few rows are idle.
        same.sort(key=lambda i: -float(codec.config_of(messages[i]).get("cost", 0)))
        most = size if kind in STACKED_MESSAGE_TYPES else 1
        stacks += [same[i : i + most] for i in range(0, len(same), most)]
    return stacks


def schedule_balanced(costs: Sequence[float], workers: int) -> Iterator[list[int]]:
    """Assign tasks to workers, longest first to the least loaded: one batch per worker, each in request order."""
    loads, rows = np.zeros(workers), [[] for _ in range(workers)]  # type: ignore[var-annotated]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        worker = int(loads.argmin())
        loads[worker] += costs[i]
        rows[worker].append(i)
    return (sorted(part) for part in rows if part)


def schedule_guided(costs: Sequence[float], workers: int, least: float) -> Iterator[list[int]]:
    """Cut tasks into batches for free workers, longest first. Each has half an equal share of the rest, or ``least``.

    Workers differ in speed, and costs are estimates. With one batch per worker the round would wait for the slowest. A rest
    that is too small to be cut is balanced.
    """
    left = sum(costs)
    if left <= 2 * workers * least:
        yield from schedule_balanced(costs, workers)
        return
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    while order:
        aim, taken = max(left / (2 * workers), least), 0.0
        batch: list[int] = []
        while order and (not batch or taken + costs[order[0]] <= aim):
            taken += costs[order[0]]
            batch.append(order.pop(0))
        left -= taken
        yield sorted(batch)
