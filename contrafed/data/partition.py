"""Partition a data set: every client has an index array into it, as a pure function of the seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np

from contrafed.core.client_run import Choice
from contrafed.core.errors import UserError
from contrafed.core.randomness import generator
from contrafed.core.schema import OnlyWith, Range
from contrafed.data import checks
from contrafed.data.feature_shift import FeatureShift
from contrafed.data.images import ImageData
from contrafed.data.owners import OwnerCounts, count_owners, deal_by_owner
from contrafed.data.stratified import cut_stratified, keep_stratified


@dataclass(frozen=True)
class Common:
    """Settings that the ``Config`` of every partition inherits."""

    min_client_size: Annotated[int, Range(ge=0)]
    max_redraws: Annotated[int, Range(ge=0), OnlyWith("min_client_size")]
    on_small: Annotated[Literal["error", "move", "drop"], OnlyWith("min_client_size")]
    test_fraction: Annotated[float, Range(ge=0, lt=1)] | None
    validation_fraction: Annotated[float, Range(ge=0, lt=1)]
    deal_test: bool
    keep_fraction: Annotated[float, Range(gt=0, le=1)]
    scarce_clients: Annotated[int, Range(ge=0)]
    scarce_fraction: Annotated[float, Range(gt=0, le=1), OnlyWith("scarce_clients")]
    cut_test: bool
    feature_shift: FeatureShift


@dataclass(frozen=True)
class Small:
    """What ``on_small`` did about clients with fewer than ``min_client_size`` examples."""

    clients: int  # number of these clients
    moved: int  # examples that were moved to them
    dropped: int  # examples that no client has because of it


class Partition:
    """Explicit index arrays: one training part and one test part per client, and its validation part if there is one."""

    small = Small(0, 0, 0)
    owners: OwnerCounts | None = None  # where clients are owners of the data
    undealt = 0  # training examples that the partition gives to no client
    kept_shares: Sequence[float] = (1.0, 1.0)  # of training examples, by all but the scarce clients and by these
    _validation, _validation_ends = np.zeros(0, dtype=np.int64), None

    def __init__(
        self,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray],
        y: np.ndarray,
        num_classes: int,
        validation: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Take K index arrays of each part, and the labels ``y`` (N,) that they index."""
        self.num_clients = len(train)
        self.num_classes = num_classes
        self._y = y
        self._train, self._train_ends = _pack_parts(train)
        self._test, self._test_ends = _pack_parts(test)
        if validation is not None:
            self._validation, self._validation_ends = _pack_parts(validation)
        for values in (self._train, self._test, self._validation):
            if len(values) and not 0 <= values.min() <= values.max() < len(y):
                raise ValueError(f"a client's part has positions in y, 0..{len(y) - 1}, got {values.min()}..{values.max()}")

    def describe_as(self, other: "Partition") -> None:
        """Take the numbers that describe ``other``, which this partition wraps."""
        self.num_clients, self.num_classes = other.num_clients, other.num_classes
        self.small, self.owners, self.kept_shares, self.undealt = other.small, other.owners, other.kept_shares, other.undealt

    @property
    def sizes(self) -> np.ndarray:
        """Training examples per client (K,)."""
        return np.diff(self._train_ends)

    @property
    def test_sizes(self) -> np.ndarray:
        """Examples in each client's own test part (K,)."""
        return np.array([len(self.test(client)) for client in range(self.num_clients)])

    @property
    def validation_sizes(self) -> np.ndarray:
        """Examples in each client's own validation part (K,)."""
        return np.zeros(self.num_clients, dtype=np.int64) if self._validation_ends is None else np.diff(self._validation_ends)

    def train(self, client: int) -> np.ndarray:
        """Return a client's training examples, int64 indices."""
        return self._train[self._train_ends[client] : self._train_ends[client + 1]]

    def true_train(self, client: int) -> np.ndarray:
        """Return a client's training examples as they are before an attack, for the evaluation of models."""
        return self.train(client)

    def test(self, client: int) -> np.ndarray:
        """Return a client's own test examples, int64 indices. May be empty."""
        return self._test[self._test_ends[client] : self._test_ends[client + 1]]

    def validation(self, client: int) -> np.ndarray:
        """Return a client's own validation examples, int64 indices. Empty without ``validation_fraction``."""
        ends = self._validation_ends
        return self._validation if ends is None else self._validation[ends[client] : ends[client + 1]]

    def class_counts(self) -> np.ndarray:
        """Return training examples per client and class (K, C), int64."""
        return self._counts

    @cached_property
    def _counts(self) -> np.ndarray:
        client = np.repeat(np.arange(self.num_clients), self.sizes)
        flat = client * self.num_classes + self._y[self._train]
        return np.bincount(flat, minlength=self.num_clients * self.num_classes).reshape(self.num_clients, -1)

    def class_proportions(self) -> np.ndarray:
        """Return each client's class proportions (K, C). Rows sum to 1, or are zeros for an empty client."""
        counts = self.class_counts()
        return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _pack_parts(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    ends = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    filled = [np.asarray(part) for part in parts if len(part)]  # an empty list would become floating-point numbers
    values = np.concatenate(filled) if filled else np.zeros(0, dtype=np.int64)
    if values.dtype.kind not in "iu":
        raise TypeError(f"a client's part is an array of whole numbers, got {values.dtype}")
    return values.astype(np.int64), ends


@dataclass(frozen=True)
class Draw:
    """What a partitioner draws from: the training examples of a data set, and its own generator."""

    y: np.ndarray  # (n,) labels of the training examples
    num_classes: int
    num_clients: int
    rng: np.random.Generator
    owner: np.ndarray | None  # (n,) the client that each comes from

    @property
    def num_present(self) -> int:
        """The number of classes that have examples."""
        return len(np.unique(self.y))

    def by_class(self) -> list[np.ndarray]:
        """Return the examples of each class that has any, as positions in ``y`` in shuffled order."""
        return [self.rng.permutation(np.flatnonzero(self.y == c)) for c in np.unique(self.y)]


def make_partition(choice: Choice, data: ImageData, num_clients: int, seed: int, merged: bool = False) -> Partition:
    """Draw the chosen partition over the training examples of ``data``.

    It is redrawn until every client has ``min_client_size`` examples, at most ``max_redraws`` times. Then ``on_small`` treats
    the draw whose smallest client is largest. Next each client holds out its test part, by default a quarter if splits were
    ``merged``. The scarcity settings thin the rest. Last, each client cuts its validation part from its training part.

    Deviation from PMFL, which redraws until every client has a batch: the default requires fewer examples and moves missing
    ones. Raises ``UserError`` for settings that these data cannot satisfy, with the numbers.
    """
    checks.check_common(choice, num_clients)
    module, config = choice.module, choice.config
    owned = getattr(module, "CLIENTS_ARE_OWNERS", False)
    if config.deal_test and not data.test.any():
        raise UserError("partition.deal_test: it needs a central test split. Fix: dataset.merge_splits=false")
    held = data.held_out.numpy()
    pool = np.flatnonzero(~held)
    y = data.y.numpy()
    if hasattr(module, "lazy"):
        if merged:
            raise UserError(f"partition={choice.name}: it has no test parts of its own. Fix: dataset.merge_splits=false")
        return _make_lazy(choice, partial(module.lazy, config, y, pool, data.num_classes, num_clients, seed), held, num_clients)
    if hasattr(module, "explicit"):
        found = checks.explicit_of(choice, held, num_clients)
        return _from_file(config, found, data, seed, held_out_fraction(config, merged))
    if num_clients > len(pool):
        raise UserError(
            f"num_clients={num_clients}: there are only {len(pool)} training examples. "
            f"Fix: num_clients={len(pool)} or fewer, or partition=sampled"
        )
    owner = data.owner[pool] if data.owner is not None else None
    needed = config.min_client_size
    if needed * num_clients > len(pool) and config.on_small != "drop":
        raise UserError(
            f"num_clients={num_clients}: at least {needed} examples each are {needed * num_clients}, the training split has "
            f"{len(pool)}. Fix: lower num_clients or partition.min_client_size"
        )
    # code that another partition reuses with other settings draws the same
    drawn_as = choice.values.get("module") or choice.name
    best = _best_draw(
        choice, y[pool], owner, data.num_classes, num_clients, lambda t: generator(seed, f"partition {drawn_as}", t)
    )
    rng = generator(seed, f"partition {drawn_as} small")
    limits = y[pool] if getattr(module, "FIXED_CLASSES", False) else None
    enough = _enough(best, limits, config, rng)
    parts = [pool[part] for part in enough]
    rng = generator(seed, f"partition {drawn_as} test")
    if config.deal_test:
        train, test = parts, deal_by_owner(best, parts, data) if owned else _deal_by_class(parts, data, rng)
    else:
        train, test = _hold_out(parts, held_out_fraction(config, merged), rng)
    partition = _apply_scarcity(train, test, data, config, seed, drawn_as)
    partition.small, partition.owners = _small(best, enough, needed), count_owners(owner, best) if owned else None
    partition.undealt = len(pool) - sum(map(len, best))
    return partition


def _make_lazy(choice: Choice, make: Callable[[], Partition], held: np.ndarray, num_clients: int) -> Partition:
    """Return a partition whose parts are drawn on request, as ``make`` builds it. ``held``: marks other splits (N,)."""
    with checks.own_code(choice, "lazy"):
        lazy = make()
    if not isinstance(lazy, Partition) or lazy.num_clients != num_clients:
        got = f"one of {lazy.num_clients}" if isinstance(lazy, Partition) else type(lazy).__name__
        wanted = f"{checks.said_of(choice, 'lazy')} a contrafed.data.partition.Partition of {num_clients} clients"
        raise UserError(f"{wanted}, got {got}")
    checks.check_lazy(choice, lazy, held, make)
    return lazy


def _from_file(
    config: Common, found: tuple[list[np.ndarray], list[np.ndarray] | None], data: ImageData, seed: int, held_out: float
) -> Partition:
    """Return a published partition, treated like a drawn one. ``found`` are its training parts, and its test parts or None."""
    published, test = found
    train = enough = _enough(published, None, config, generator(seed, "partition file small"))
    if test is None:
        train, test = _hold_out(enough, held_out, generator(seed, "partition file test"))
    elif config.on_small == "drop":
        test = [part if len(own) >= config.min_client_size else part[:0] for part, own in zip(test, published, strict=True)]
    partition = _apply_scarcity(train, test, data, config, seed, "file")
    partition.small = _small(published, enough, config.min_client_size)
    left = ~data.held_out.numpy()
    left[np.concatenate([*published, *(found[1] or [])])] = False
    partition.undealt = int(left.sum())
    return partition


def _apply_scarcity(
    train: list[np.ndarray], test: list[np.ndarray], data: ImageData, config: Common, seed: int, drawn_as: str
) -> Partition:
    """Return the partition after the scarcity settings."""
    y, validation, first_scarce, whole = data.y.numpy(), None, len(train) - config.scarce_clients, list(map(len, train))
    train = _scarce(train, y, config, generator(seed, f"partition {drawn_as} scarce"))
    kept, groups = list(map(len, train)), (slice(first_scarce), slice(first_scarce, None))
    if config.cut_test:
        test = _scarce(test, y, config, generator(seed, f"partition {drawn_as} scarce test"))
    if config.validation_fraction:
        rng = generator(seed, f"partition {drawn_as} validation")
        cut = [cut_stratified(part, y, config.validation_fraction, rng) for part in train]
        train, validation = [left for left, _ in cut], [held for _, held in cut]
    partition = Partition(train, test, y, data.num_classes, validation)
    partition.kept_shares = [sum(kept[group]) / max(sum(whole[group]), 1) for group in groups]
    return partition


def _best_draw(
    choice: Choice,
    y: np.ndarray,
    owner: np.ndarray | None,
    num_classes: int,
    num_clients: int,
    generator_of: Callable[[int], np.random.Generator],
) -> list[np.ndarray]:
    """Return the first draw with enough examples for every client, or else the one whose smallest client is largest."""
    module, config, best = choice.module, choice.config, None
    for attempt in range(config.max_redraws + 1):
        parts = checks.split_of(choice, Draw(y, num_classes, num_clients, generator_of(attempt), owner))
        if best is None or min(map(len, parts)) > min(map(len, best)):
            best = parts
        if min(map(len, parts)) >= config.min_client_size or not getattr(module, "RANDOM_SIZES", True):
            break
    assert best is not None
    return best


def _enough(parts: list[np.ndarray], limits: np.ndarray | None, common: Common, rng: np.random.Generator) -> list[np.ndarray]:
    """Apply ``on_small`` to clients with fewer than ``min_client_size`` examples.

    Args:
        parts: The clients' examples.
        limits: Labels (n,), if moved examples must not add classes to a client. None allows any example.
        common: Settings.
        rng: The generator.
    """
    needed = common.min_client_size
    small = [k for k, part in enumerate(parts) if len(part) < needed]
    if not small:
        return parts
    if common.on_small == "error":
        least = min(small, key=lambda k: len(parts[k]))
        raise UserError(
            f"partition.min_client_size={needed}: {len(small)} of {len(parts)} clients have fewer examples (client {least} has "
            f"{len(parts[least])}) and partition.max_redraws={common.max_redraws}. "
            "Fix: lower the size, or set partition.on_small=move or drop"
        )
    if common.on_small == "drop":
        if len(small) == len(parts):
            raise UserError(
                f"partition.min_client_size={needed}: all {len(parts)} clients have fewer examples (the largest has "
                f"{max(map(len, parts))}) and would be dropped. Fix: lower it, or lower num_clients"
            )
        return [part if len(part) >= needed else part[:0] for part in parts]
    return _fill_small_clients(parts, needed, limits, rng)


def _small(before: list[np.ndarray], after: list[np.ndarray], needed: int) -> Small:
    """Return what changed between two lists of parts."""
    gained = [len(new) - len(old) for old, new in zip(before, after, strict=True)]
    return Small(sum(len(part) < needed for part in before), sum(max(change, 0) for change in gained), -sum(gained))


def _fill_small_clients(
    parts: list[np.ndarray], needed: int, limits: np.ndarray | None, rng: np.random.Generator
) -> list[np.ndarray]:
    """Fill small clients from those with most to spare, at random. No giver falls below ``needed``."""
    parts = list(parts)
    for k in [k for k, part in enumerate(parts) if len(part) < needed]:
        while len(parts[k]) < needed:
            # An empty client gets the classes of its first giver, which keeps to the limit itself.
            fits = np.ones(0, dtype=bool) if limits is None else np.isin(limits, limits[parts[k]])
            limited = limits is not None and len(parts[k]) > 0

            def spare(j: int, fits: np.ndarray = fits, limited: bool = limited) -> int:
                extra = len(parts[j]) - needed
                return min(extra, int(fits[parts[j]].sum())) if limited else extra

            giver = max(range(len(parts)), key=spare)
            give = min(needed - len(parts[k]), spare(giver))
            if give <= 0:
                raise UserError(
                    f"partition.min_client_size={needed}: client {k} has {len(parts[k])} of the "
                    f"{sum(map(len, parts))} examples that {len(parts)} clients hold, and no other client has "
                    "fitting ones to spare. Fix: lower it, or set partition.on_small=drop"
                )
            order = rng.permutation(parts[giver])
            taken = np.flatnonzero(fits[order])[:give] if limited else np.arange(give)
            parts[k], parts[giver] = np.concatenate([parts[k], order[taken]]), np.delete(order, taken)
    return parts


def held_out_fraction(common: Common, merged: bool) -> float:
    """Return the share of a client's examples that becomes its own test part."""
    if common.test_fraction is not None:
        return common.test_fraction
    return 0.25 if merged else 0.0


def _hold_out(parts: list[np.ndarray], fraction: float, rng: np.random.Generator) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Shuffle each client's examples and cut off its test part. A client with any example keeps one for training."""
    if fraction == 0:
        return parts, [part[:0] for part in parts]
    train, test = [], []
    for part in parts:
        order = rng.permutation(part)
        held = min(round(fraction * len(part)), max(len(part) - 1, 0))
        test.append(order[:held])
        train.append(order[held:])
    return train, test


def _deal_by_class(parts: list[np.ndarray], data: ImageData, rng: np.random.Generator) -> list[np.ndarray]:
    """Divide the central test split among clients, each class in proportion to their training examples of it."""
    test, y = np.flatnonzero(data.test.numpy()), data.y.numpy()
    counts = np.array([np.bincount(y[part], minlength=data.num_classes) for part in parts])
    mine: list[list[np.ndarray]] = [[] for _ in parts]
    for label in range(data.num_classes):
        members, held = rng.permutation(test[y[test] == label]), counts[:, label].cumsum()
        cuts = np.round(held / max(held[-1], 1) * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)[: len(parts)]):
            mine[client].append(piece)
    return [np.concatenate(pieces) for pieces in mine]


def _scarce(parts: list[np.ndarray], y: np.ndarray, common: Common, rng: np.random.Generator) -> list[np.ndarray]:
    """Keep a stratified fraction of training or test parts (FedCoSR's scarcity settings)."""
    first_scarce = len(parts) - common.scarce_clients
    kept = []
    for client, part in enumerate(parts):
        fraction = common.keep_fraction * (common.scarce_fraction if client >= first_scarce else 1.0)
        kept.append(part if fraction == 1 else keep_stratified(part, y, fraction, rng))
    return kept
