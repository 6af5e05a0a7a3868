"""Draw which examples each client of a stack uses at each step of a phase, with dropout and augmentation."""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from contrafed.core.drawn import NETWORK, NUMBERS
from contrafed.core.randomness import generator, torch_generator
from contrafed.core.tensors import Tensors
from contrafed.training.augment import augment_images, compute_changes, draw_uniform
from contrafed.training.client_stack import ClientStack, describe_shapes, each_image
from contrafed.training.local_training import LocalTraining


class Batch(NamedTuple):
    """One minibatch of every client in the stack. Inside a loss it is one client's, without B."""

    x: Tensor  # (B, b, C, H, W) normalised images, or (B, b, E) a frozen encoder's outputs for them
    y: Tensor  # (B, b) labels
    mask: Tensor  # (B, b) 1 for an example, 0 for padding
    # For a model with dropout: by layer, factors 0 or 1/(1-p) (B, b, D) on its input. Under NETWORK: a number of each example
    # (B, b, 1), by which layers within a network drop (contrafed/core/drawn.py).
    dropout: dict[str, Tensor]

    def __repr__(self) -> str:
        """Return shapes, not the numbers."""
        known = {"x": self.x, "y": self.y, "mask": self.mask} | {f"dropout[{name!r}]": v for name, v in self.dropout.items()}
        return f"Batch({describe_shapes(known)})"


class Source(NamedTuple):
    """The clients and the stream of drawn batches."""

    local_training: LocalTraining
    clients: list[int]
    server_round: int
    purpose: str


class Batches:
    """The batches of a phase: a pure function of (seed, purpose, round, client), independent of the other clients in the
    stack.
    """

    def __init__(self, workspace: Any, rows: list[list[np.ndarray]]) -> None:
        """Lay out each client's batches ``rows``, arrays of indices."""
        self.workspace, self.rows = workspace, rows
        self.steps = [len(row) for row in rows]  # per client
        lengths = np.zeros((len(rows), max(self.steps, default=0)), dtype=np.int64)
        for client, row in enumerate(rows):
            lengths[client, : len(row)] = [len(batch) for batch in row]
        width = int(lengths.max(initial=1))
        # A short batch of a single client stays short. In a stack it is padded and masked.
        self.widths = lengths[0].clip(1).tolist() if len(lengths) == 1 else [width] * lengths.shape[1]
        self.real = torch.from_numpy(np.arange(width) < lengths[..., None])  # (B, S, b)
        seen = [batch for row in rows for batch in row]
        self.index = self._laid(torch.from_numpy(np.concatenate(seen) if seen else np.zeros(0, np.int64)), 0)
        self.mask = self.real.to(workspace.device, workspace.dtype)
        self.counts = torch.from_numpy(lengths).to(self.mask)  # (B, S) examples at each step
        self.dropout: Tensors = {}  # by layer (B, S, b, D)
        self.source: Source  # of drawn batches
        self.augmented: Tensor | None = None  # (B, S, b, H, W, C) uint8: the phase's images if they are augmented

    @classmethod
    def draw(
        cls, workspace: Any, local_training: LocalTraining, stack: ClientStack, purpose: str, repeat: int = 1
    ) -> "Batches":
        """Draw the batches of a phase, with dropout and augmentation. Each batch is used for ``repeat`` steps."""
        known = zip(stack.examples, stack.clients, strict=True)
        about = (workspace.seed, purpose, stack.server_round)
        rows = [draw_batches(local_training, part, *about, client) for part, client in known]
        limits = stack.limit_batches([len(row) for row in rows], repeat)
        out = cls(workspace, [row[:limit] for row, limit in zip(rows, limits, strict=True)])
        out.source = Source(local_training, stack.clients, stack.server_round, purpose)
        model = workspace.model
        for layer in model.dropped if model.dropout else ():
            width = model.get_submodule(layer).in_features
            out.dropout[layer] = out._draw_for_clients(purpose, draw_dropout, model.dropout, layer, width, padding=1)
        if model.draws:
            out.dropout[NETWORK] = out._draw_for_clients(purpose, draw_numbers, padding=0)
        if local_training.augment and out.index.numel():
            out.augmented = out._augmentation(purpose)
        return out

    @cached_property
    def second_view(self) -> "Batches":
        """Return the same drawn batches with other augmentations of their images."""
        other = copy.copy(self)
        vars(other).pop("_distinct", None)
        other.augmented = self._augmentation(f"{self.source.purpose} second view")
        return other

    def _augmentation(self, stream: str) -> Tensor:
        """Return every image of the phase, augmented once and in whole numbers if it is changed. A round uses them many times.

        PMFL with CIFAR-100's chain takes 168 ms a round. With an augmentation at every use it takes 294 ms (one core).
        """
        x, kinds = self.workspace.x, self.source.local_training.augment
        # Drawn client by client, then computed for all at once, which takes a third of the time in a stack of 25.
        finish = partial(compute_changes, kinds=kinds, side=min(x.shape[1:3]))
        changes = self._draw_for_clients(stream, draw_uniform, kinds, padding=0, finish=finish).flatten(0, 2)
        index, size = self.index.flatten(), self.workspace.evaluation_batch
        out = x.new_empty((len(index), *x.shape[1:]))
        for part, some, change in zip(out.split(size), index.split(size), changes.split(size), strict=True):
            part.copy_(augment_images(self.workspace.raw_images(some).to(self.workspace.dtype), change))
        return out.unflatten(0, self.index.shape)

    def _draw_for_clients(
        self,
        stream: str,
        draw: Callable[..., Tensor],
        *what: Any,
        padding: float,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return the draws for every client's examples of the phase, laid out as (B, S, b, ...).

        ``finish`` computes what is wanted from the draws (n, ...) of all clients.
        """
        counts = [sum(map(len, row)) for row in self.rows]
        about = (self.workspace.seed, stream, self.source.server_round)
        found = [draw(*what, count, *about, client) for count, client in zip(counts, self.source.clients, strict=True)]
        drawn = torch.cat(found) if finish is None else finish(torch.cat(found))
        return self._laid(drawn, padding).to(self.workspace.dtype)

    @classmethod
    def one_pass(cls, workspace: Any, examples: Sequence[np.ndarray], padded: bool = False) -> "Batches":
        """Lay out one pass over each client's ``examples`` in their order, in batches of the evaluation's size.

        Args:
            workspace: The workspace.
            examples: Each client's examples (n,).
            padded: Add a batch of padding if no client has examples, so that sums are zeros, as for such a client in a stack.
        """
        size = max(1, workspace.evaluation_batch // len(examples))
        rows = [[part[i : i + size] for i in range(0, len(part), size)] for part in examples]
        if padded and not any(rows) and len(workspace.x):
            rows[0] = [examples[0]]
        return cls(workspace, rows)

    @property
    def repeat(self) -> bool:
        """Return whether an example occurs more than once, always as the same image."""
        seen = [np.concatenate(row) for row in self.rows if row]
        return self.augmented is None and any(len(np.unique(examples)) < len(examples) for examples in seen)

    def segments(self) -> Iterator[tuple[range, int]]:
        """Yield segments of steps with the number of clients that train in them. These are the stack's first clients."""
        alive = [sum(steps > step for steps in self.steps) for step in range(self.index.shape[1])]
        for count, steps in groupby(range(len(alive)), alive.__getitem__):
            found = list(steps)
            yield range(found[0], found[-1] + 1), count

    def at(self, step: int, clients: int, inputs: "ReferenceOutputs | None" = None) -> Batch:
        """Return the batch of a step for the first ``clients`` clients. ``inputs`` replace its images."""
        width = self.widths[step]
        y, mask = self._labels[:clients, step, :width], self.mask[:clients, step, :width]
        dropout = {layer: factors[:clients, step, :width] for layer, factors in self.dropout.items()}
        x = self.images(range(step, step + 1), clients) if inputs is None else inputs.at(step, clients)
        return Batch(x, y, mask, dropout)

    @cached_property
    def _labels(self) -> Tensor:
        """The labels (B, S, b) of the phase, looked up at once."""
        labels: Tensor = self.workspace.labels(self.index)
        return labels

    def images(self, steps: range, clients: int) -> Tensor:
        """Return the images (clients, n, C, H, W) of some steps, one step after another."""
        each = [(slice(None, clients), step, slice(None, self.widths[step])) for step in steps]
        source = self.index if self.augmented is None else self.augmented
        return self._normalise(torch.cat([source[at] for at in each], 1))

    def _normalise(self, found: Tensor) -> Tensor:
        """Return images (..., C, H, W) of examples (...), or of augmented images (..., H, W, C)."""
        look_up = self.workspace.images if self.augmented is None else self.workspace.normalise_images
        images: Tensor = look_up(found)
        return images

    def table(self, function: Callable[[Tensors, Tensor], Any], params: Tensors) -> "ReferenceOutputs":
        """Call one client's ``function`` of a model (B, ...) and images once for every image of the phase."""
        known, where = self._distinct
        size, pieces = max(1, self.workspace.evaluation_batch // len(known)), []
        with torch.no_grad():
            for first in range(0, known.shape[1], size):
                some = slice(None), slice(first, first + size)
                pieces.append(each_image(function, params, self._normalise(known[some])))
        rows = tree_map(lambda *rows: torch.cat(rows, 1).flatten(0, 1), *pieces)
        first_rows = torch.arange(0, known.shape[0] * known.shape[1], known.shape[1], device=where.device)
        return ReferenceOutputs(self, rows, where + first_rows.view(-1, 1, 1))

    @cached_property
    def _distinct(self) -> tuple[Tensor, Tensor]:
        """Return the phase's distinct images and each step's places among them (B, S, b).

        The images are examples (B, n), or augmented images (B, n, H, W, C).
        """
        if self.augmented is not None:  # no two images are equal
            where = torch.arange(self.index[0].numel(), device=self.index.device).view(1, *self.index.shape[1:])
            return self.augmented.flatten(1, 2), where.expand(self.index.shape)
        nothing = np.zeros(1, np.int64), np.zeros(0, np.int64)
        found = [np.unique(np.concatenate(row), return_inverse=True) if row else nothing for row in self.rows]
        known = np.zeros((len(found), max(len(own) for own, _ in found)), np.int64)
        for client, (own, _) in enumerate(found):
            known[client, : len(own)] = own
        places = np.concatenate([where for _, where in found])
        return torch.from_numpy(known).to(self.index.device), self._laid(torch.from_numpy(places), 0)

    def _laid(self, values: Tensor, padding: float) -> Tensor:
        """Lay out values of the phase's examples, in the order of each client's training, as (B, S, b, ...)."""
        shape = (*self.real.shape, *values.shape[1:])
        if len(values) == self.real.numel():  # no padding
            return values.reshape(shape).to(self.workspace.device)
        out = values.new_full(shape, padding)
        out[self.real] = values
        return out.to(self.workspace.device)


class ReferenceOutputs(NamedTuple):
    """A frozen model's outputs for every image of a phase."""

    batches: Batches
    rows: Any  # (B n, ...)
    where: Tensor  # (B, S, b) places among the rows

    def at(self, step: int, clients: int) -> Any:
        """Return the rows (clients, b, ...) of a step's batch."""
        where = self.where[:clients, step, : self.batches.widths[step]]
        return tree_map(lambda rows: rows.index_select(0, where.flatten()).unflatten(0, where.shape), self.rows)


def draw_batches(
    local_training: LocalTraining, examples: np.ndarray, seed: int, purpose: str, server_round: int, client: int
) -> list[np.ndarray]:
    """Draw a client's batches of a round, as a pure function of (seed, purpose, round, client)."""
    if not local_training.steps(len(examples)):  # a generator takes 40 us, a seventh of the time of such a client
        return []
    return local_training.batches(examples, generator(seed, purpose, server_round, client))


def draw_dropout(
    rate: float, layer: str, width: int, count: int, seed: int, purpose: str, server_round: int, client: int
) -> Tensor:
    """Draw factors (count, width) on a layer's inputs for all examples that a client uses in a round, in their order."""
    stream = f"{purpose} dropout" if layer == "classifier" else f"{purpose} dropout {layer}"
    rng = torch_generator(seed, stream, server_round, client)
    return (torch.rand(count, width, generator=rng) >= rate).float() / (1 - rate)


def draw_numbers(count: int, seed: int, purpose: str, server_round: int, client: int) -> Tensor:
    """Draw a number (count, 1) of each example that a client uses in a round, by which layers within a network drop."""
    rng = torch_generator(seed, f"{purpose} dropout within the network", server_round, client)
    return torch.randint(NUMBERS, (count, 1), generator=rng).float()
