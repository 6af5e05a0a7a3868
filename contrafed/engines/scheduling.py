"""Assign a round's messages to workers, in batches that keep all workers busy to the end."""

from collections.abc import Iterator, Sequence

import numpy as np
from flwr.app import Message

from contrafed.core import codec


def cost_of(message: Message) -> float:
    """Return the amount of work of a message, in steps."""
    return max(float(codec.config_of(message).get("cost", 1)), 1.0)  # a client without steps still takes a moment


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
