"""pathological: each client holds a fixed number of classes (FedCRL, FedCoSR, MpFedcon)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.schema import OnlyWith, Range
from contrafed.data.partition import Common, Draw


@dataclass(frozen=True)
class Config(Common):
    """Settings of the partition."""

    classes_per_client: Annotated[int, Range(ge=1)]
    scheme: Literal["classes", "shards"]
    pieces: Annotated[Literal["equal", "random", "uniform"], OnlyWith("scheme", "classes")]
    distinct: Annotated[bool, OnlyWith("scheme", "shards")]


# Clients that get more examples get no further class.
FIXED_CLASSES = True


def split(config: Config, draw: Draw) -> list[np.ndarray]:
    """Return K parts of S classes each (FedCRL's pathological setting, and MpFedcon on CIFAR).

    A client has fewer classes if it draws one twice, or if K S / C is not whole and later clients find few classes left.

    Raises:
        UserError: If no such partition exists.
    """
    wanted, classes, clients = config.classes_per_client, draw.num_present, draw.num_clients
    if wanted > classes:
        raise UserError(f"partition.classes_per_client={wanted}: the data have {classes} classes. Fix: a smaller number")
    if wanted * clients < classes:
        raise UserError(
            f"num_clients={clients}: clients of {wanted} classes hold at most {wanted * clients} of the {classes} classes. "
            "Fix: raise num_clients or partition.classes_per_client"
        )
    return _classes(config, draw) if config.scheme == "classes" else _shards(config, draw)


def _classes(config: Config, draw: Draw) -> list[np.ndarray]:
    """Deal class by class to the first ceil(K S / C) clients with room.

    The pieces of a class are equal, or cut at random places, or have uniform sizes between a tenth of an equal piece and all of
    it, of which the last holder gets the rest (PFLlib's).
    """
    clients, classes = draw.num_clients, draw.num_present
    room = np.full(clients, config.classes_per_client)
    pieces: list[list[np.ndarray]] = [[] for _ in range(clients)]
    for label, examples in enumerate(draw.by_class()):
        # Leave room for one holder of each later class.
        holders = min(-(-clients * config.classes_per_client // classes), int(room.sum()) - (classes - label - 1))
        takers = np.flatnonzero(room > 0)[:holders]
        room[takers] -= 1
        if config.pieces == "equal":
            parts = np.array_split(examples, len(takers))
        elif config.pieces == "uniform":
            equal = len(examples) / max(len(takers), 1)
            sizes = draw.rng.integers(int(equal / 10), max(int(equal), int(equal / 10) + 1), max(len(takers) - 1, 0))
            parts = np.split(examples, np.cumsum(sizes))
        else:
            inner = max(len(examples) - 1, 0)
            cuts: np.ndarray = 1 + draw.rng.choice(inner, min(len(takers) - 1, inner), replace=False) if inner else np.zeros(0)
            parts = np.split(examples, np.sort(cuts).astype(np.int64))
        for taker, part in zip(takers, parts, strict=False):
            pieces[taker].append(part)
    return [np.concatenate(p) if p else np.zeros(0, dtype=np.int64) for p in pieces]


def _shards(config: Config, draw: Draw) -> list[np.ndarray]:
    """Cut every class into K S / C shards and deal S to each client.

    Unless ``distinct``, a client may draw a class twice.
    """
    clients, classes, each = draw.num_clients, draw.num_present, config.classes_per_client
    # If K S / C is not whole, the first classes in a random order have one shard more.
    shards = np.full(classes, clients * each // classes)
    shards[draw.rng.permutation(classes)[: clients * each % classes]] += 1
    if config.distinct:
        room = np.full(clients, each)
        dealt: list[list[int]] = [[] for _ in range(clients)]
        for label in sorted(draw.rng.permutation(classes), key=lambda c: -shards[c]):
            # Deal to the clients with most room, ties at random. Then every class finds clients with room.
            order = np.lexsort((draw.rng.random(clients), -room))[: shards[label]]
            room[order] -= 1
            for client in order:
                dealt[client].append(int(label))
    else:
        labels = draw.rng.permutation(np.repeat(np.arange(classes), shards))
        dealt = labels.reshape(clients, each).tolist()
    stacks = [list(np.array_split(examples, max(n, 1))) for examples, n in zip(draw.by_class(), shards, strict=True)]
    return [np.concatenate([stacks[label].pop() for label in labels]) for labels in dealt]
