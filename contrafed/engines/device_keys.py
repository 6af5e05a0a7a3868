"""Bind the keys of devices to their partitions, where the SuperLink demands a registered key of every SuperNode."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.serverapp import Grid

from contrafed.core.errors import UserError

# A call of the Fleet API that changes nothing without a known node. It is unsigned here, so a SuperLink with keys refuses it.
UNSIGNED_CALL = "/v1/fleet/send-node-heartbeat"
PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}
UNAUTHORIZED = 401


def demands_keys(grid: Grid) -> bool:
    """Return whether the SuperLink knows every SuperNode by a registered key. Without one, a key lasts as long as its process.

    Raises:
        UserError: If Flower's Grid cannot be asked.
    """
    client: Any = getattr(grid, "_runtime_client", None)  # Flower's Grid does not say it
    http, address = getattr(client, "_client", None), getattr(client, "_base_url", None)
    if http is None or address is None:
        raise UserError("this version of Flower does not say in a known way whether SuperNodes have keys")
    return bool(http.post(f"{address}{UNSIGNED_CALL}", content=b"", headers=PROTOBUF).status_code == UNAUTHORIZED)


def read_keys(grid: Grid) -> dict[int, str]:
    """Return the SHA-256 of the public key of each connected SuperNode, by node id."""
    nodes: Iterable[Any] = grid.get_nodes()
    return {node.node_id: hashlib.sha256(node.public_key).hexdigest() for node in nodes}


class KeyTable:
    """Which key belongs to which partition in a run: the first that answered for it."""

    def __init__(self, read: Callable[[], Mapping[int, str]], bound: Mapping[int, str]) -> None:
        """Start with the keys by partition that an earlier attempt of the run had bound. ``read`` returns them by node id."""
        self.read, self.bound = read, dict(bound)

    def bind(self, node_id: int, key: str, partition: int) -> None:
        """Bind a key to a partition. Raises ``UserError`` if either is bound to another."""
        owner = next((k for k, known in self.bound.items() if known == key), partition)
        who = f"client {node_id} says partition-id={partition}"
        if owner != partition:
            raise UserError(f"{who}, but its key is that of partition {owner}. Fix: partition-id={owner} in its --node-config")
        if self.bound.setdefault(partition, key) != key:
            raise UserError(f"{who}, which belongs to another key. Fix: a partition-id of its own, or begin the run anew")
