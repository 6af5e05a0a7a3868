"""Measure how much clients gain over training alone (MpFedcon, Figure 9)."""

from collections.abc import Mapping


def gains(ours: Mapping[int, float], alone: Mapping[int, float]) -> dict[int, float]:
    """Compute each client's accuracy in ``ours`` minus that in ``alone``, for clients in both.

    MpFedcon, Figure 9: a method compared with SOLO (``strategy=local``).
    """
    return {client: ours[client] - alone[client] for client in sorted(ours.keys() & alone.keys())}


def gaining(found: Mapping[int, float]) -> float:
    """Return the share of clients with a gain above 0. Raises ``ValueError`` without clients."""
    if not found:
        raise ValueError("no clients")
    return sum(value > 0 for value in found.values()) / len(found)
