"""Bind the keys of devices to their partitions, where the SuperLink demands a registered key of every SuperNode."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import httpx
from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from contrafed.core.errors import UserError

# A SuperLink with registered keys answers so when a SuperNode registers itself.
REGISTRATION_DISABLED = 412


def demands_keys(grid: Grid) -> bool:
    """Return whether the SuperLink knows every SuperNode by a registered key. Without one, a key lasts as long as its process.

    Flower tells a ServerApp no other way, so a SuperNode is registered with a new key, and removed where that succeeds.

    Raises:
        httpx.HTTPError: If the SuperLink does not answer, or answers with a passing error.
        UserError: If the SuperLink or Flower cannot be asked in this way.
    """
    private, public = generate_key_pairs()
    try:
        with FleetHttpClient.from_server_address(
            grid._addr,  # type: ignore[attr-defined]
            grid._insecure,  # type: ignore[attr-defined]
            grid._cert,  # type: ignore[attr-defined]
            [NodeAuthHttpInterceptor(private, public)],
        ) as client:
            made = client.RegisterNode(RegisterNodeFleetRequest(public_key=public_key_to_bytes(public)))
            client.UnregisterNode(UnregisterNodeFleetRequest(node_id=made.node_id))
    except httpx.HTTPStatusError as error:
        if error.response.status_code == REGISTRATION_DISABLED:
            return True
        if error.response.is_server_error:
            raise
        raise UserError(f"the SuperLink does not say whether SuperNodes have keys ({error})") from error
    except AttributeError as error:
        raise UserError(f"this version of Flower does not say whether SuperNodes have keys ({error})") from error
    return False


def read_keys(grid: Grid) -> dict[int, str]:
    """Return the SHA-256 of the public key of each connected SuperNode, by node id."""
    nodes: Iterable[Any] = grid.get_nodes()
    return {node.node_id: hashlib.sha256(node.public_key).hexdigest() for node in nodes}


class KeyTable:
    """Which key belongs to which partition in a run: the first that answered for it."""

    def __init__(self, read: Callable[[], Mapping[int, str]], bound: Mapping[int, str]) -> None:
        """Start with the keys by partition that an earlier attempt of the run had bound. ``read`` returns them by node id."""
        self.read, self.bound = read, dict(bound)

    def bind(self, client: str, key: str, partition: int) -> None:
        """Bind the key of ``client``, as messages call it, to a partition. Raises ``UserError`` if either is bound already."""
        owner = next((k for k, known in self.bound.items() if known == key), partition)
        who = f"{client} says partition-id={partition}"
        if owner != partition:
            raise UserError(f"{who}, but its key is that of partition {owner}. Fix: partition-id={owner} in its --node-config")
        if self.bound.setdefault(partition, key) != key:
            raise UserError(f"{who}, which belongs to another key. Fix: a partition-id of its own, or another run")
