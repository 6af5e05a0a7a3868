"""By how much nodes gain over training alone (MpFedcon, Figure 9)."""

from collections.abc import Mapping


def gains(ours: Mapping[int, float], alone: Mapping[int, float]) -> dict[int, float]:
    """Return by how much each node's accuracy in ``ours`` exceeds that in ``alone``, both by node, of the nodes in both.

    MpFedcon, Figure 9: a method against SOLO (``strategy=local``).
    """
    return {node: ours[node] - alone[node] for node in sorted(ours.keys() & alone.keys())}


def gaining(found: Mapping[int, float]) -> float:
    """Return the share of nodes whose gain is above 0. Raises ``ValueError`` without nodes."""
    if not found:
        raise ValueError("no nodes")
    return sum(value > 0 for value in found.values()) / len(found)
