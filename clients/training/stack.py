"""A stack of nodes in training: everything carries a leading node axis B."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from core.config import Range
from core.errors import UserError
from core.randomness import generator, torch_generator


@dataclass(frozen=True)
class LocalWork:
    """What a node does in a round: how long, in which batches, with which optimiser.

    Exactly one of ``epochs`` (shuffled passes; the short last batch of each is kept) and ``iterations`` (minibatch steps
    through successive shuffled passes, every batch of the full size, or of all examples of a smaller node) is set.
    """

    epochs: Annotated[int, Range(ge=0)] | None
    iterations: Annotated[int, Range(ge=0)] | None
    batch_size: Annotated[int, Range(ge=1)] | Annotated[float, Range(gt=0, lt=1)]  # a fraction: of the node's examples
    optimizer: Literal["sgd", "adam"]
    lr: Annotated[float, Range(gt=0)]
    lr_decay: Annotated[float, Range(gt=0, le=1)]
    epoch_lr_decay: Annotated[float, Range(gt=0, le=1)]
    momentum: Annotated[float, Range(ge=0, lt=1)]
    weight_decay: Annotated[float, Range(ge=0)]
    proximal_weight: Annotated[float, Range(ge=0)]
    clip_norm: Annotated[float, Range(gt=0)] | None
    keep_optimizer: bool
    augment: tuple[Literal["rotation", "crop", "flip"], ...]
    mixed_precision: bool

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            raise UserError(
                "exactly one of strategy.local.epochs and strategy.local.iterations must be set, "
                f"got epochs={self.epochs} iterations={self.iterations}"
            )

    @property
    def own_clock(self) -> bool:
        """Whether the optimisers of a stack's nodes differ in more than their gradients."""
        return self.keep_optimizer or self.epoch_lr_decay != 1

    def batch_of(self, examples: int) -> int:
        """Return the batch size of a node with so many examples."""
        if isinstance(self.batch_size, float):
            return max(1, math.ceil(round(self.batch_size * examples, 9)))  # 0.07 * 100 is 7.000000000000001
        return self.batch_size

    def steps_per_pass(self, examples: int) -> int:
        """Return how many batches a shuffled pass over so many examples gives, at least 1."""
        size = self.batch_of(examples)
        return max(1, math.ceil(examples / size) if self.epochs is not None else examples // min(size, max(examples, 1)))

    def steps(self, examples: int) -> int:
        """Return the number of optimiser steps of a node with so many examples."""
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        return self.epochs * self.steps_per_pass(examples) if examples else 0

    def batches(self, examples: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Return the node's batches of this round: arrays of indices drawn from ``examples`` (n,)."""
        size = self.batch_of(len(examples))
        if self.epochs is not None:
            orders = [rng.permutation(examples) for _ in range(self.epochs)]
            return [order[i : i + size] for order in orders for i in range(0, len(order), size)]
        assert self.iterations is not None
        size = min(size, len(examples))
        passes = math.ceil(self.iterations / (len(examples) // size))
        whole = len(examples) // size * size
        orders = [rng.permutation(examples)[:whole] for _ in range(passes)]
        return list(np.concatenate(orders).reshape(-1, size)[: self.iterations]) if orders else []

    def rate(self, server_round: int, epoch: int = 0) -> float:
        """Return the learning rate of a 1-based round and a 0-based local epoch: lr * decay^(t-1) * epoch_decay^e."""
        return self.lr * self.lr_decay ** (server_round - 1) * self.epoch_lr_decay**epoch

    def optimizer_for(self, parameters: Sequence[Tensor], server_round: int) -> torch.optim.Optimizer:
        """Return the optimiser over stacked parameters; SGD and Adam act element by element, so stacking is exact."""
        lr = self.rate(server_round)
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=lr, weight_decay=self.weight_decay)
        return torch.optim.SGD(parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)


class Batch(NamedTuple):
    """One minibatch of every node in the stack; inside a loss, of one node (without B)."""

    x: Tensor  # (B, b, C, H, W) normalised images
    y: Tensor  # (B, b) labels
    mask: Tensor  # (B, b) 1 for an example, 0 for padding
    dropout: Tensor  # (B, b, D) factors 0 or 1/(1-p) on the representation; (B,) unused ones for a model without dropout


@dataclass
class Plan:
    """Which examples each node of the stack sees at each step."""

    steps: list[int]  # per node, descending
    lengths: list[list[int]]  # batch sizes per node and step
    index: Tensor  # (B, S, b) int64 on the device
    mask: Tensor  # (B, S, b)

    def width(self, first: int, last: int) -> int:
        """Return the size of the largest batch of the steps from ``first`` until ``last``: of a stack, of all steps."""
        return max(self.widths(first, last))

    def widths(self, first: int, last: int) -> list[int]:
        """Return the size of each of these steps' batches: a lone node's own, since it needs no padding."""
        return self.lengths[0][first:last] if len(self.lengths) == 1 else [self.index.shape[2]] * (last - first)

    @classmethod
    def draw(cls, batches: list[list[np.ndarray]], device: torch.device, dtype: torch.dtype) -> "Plan":
        """Lay out the batches of B nodes as padded tensors."""
        lengths = [[len(batch) for batch in rows] for rows in batches]
        steps = [len(rows) for rows in batches]
        width = max((length for row in lengths for length in row), default=1)
        index = np.zeros((len(batches), max(steps, default=0), width), dtype=np.int64)
        mask = np.zeros(index.shape, dtype=np.float32)
        for node, rows in enumerate(batches):
            for step, batch in enumerate(rows):
                index[node, step, : len(batch)] = batch
                mask[node, step, : len(batch)] = 1
        return cls(steps, lengths, torch.from_numpy(index).to(device), torch.from_numpy(mask).to(device, dtype))

    def picker(self, drawn: Sequence[Tensor], padding: float) -> Callable[[int, int, int], Tensor]:
        """Return what picks the rows (alive, S, width, k) of some steps of ``drawn``: per node (examples, k), as it sees them.

        All of it is brought to the device at once: an accelerator would wait for a copy at every step.
        """
        flat = torch.cat([*drawn, drawn[0].new_full((1, drawn[0].shape[1]), padding)]).to(self.mask)
        place = np.full(self.index.shape, len(flat) - 1, dtype=np.int64)
        start = 0
        for node, lengths in enumerate(self.lengths):
            for step, length in enumerate(lengths):
                place[node, step, :length] = np.arange(start, start + length)
                start += length
        where = torch.from_numpy(place).to(self.mask.device)

        def pick(first: int, last: int, alive: int) -> Tensor:
            return flat[where[:alive, first:last, : self.width(first, last)]]

        return pick


def one_step(block: Batch, place: int, width: int, nodes: int) -> Batch:
    """Return the batch (nodes, width, ...) of one step of a block (B, S, b, ...), for the first nodes."""
    each = [value[:nodes, place] for value in block]
    if width < block.y.shape[2]:
        each = [value[:, :width] if value.dim() > 1 else value for value in each]
    return Batch(*each)


class Coming:
    """The batches of a phase from the current step on, made in blocks of several steps when one of them is looked at."""

    def __init__(self, make: Callable[[int], tuple[Batch, list[int]]]) -> None:
        """``make(step)`` returns a block (B, S, b, ...), the batches of S steps from ``step`` on for the nodes that are in the
        stack now, and how wide each is.
        """
        self.make = make
        self._found: dict[int, tuple[Batch, int, int]] = {}  # by step: its block, its place in that, its width

    def _find(self, step: int) -> tuple[Batch, int, int]:
        if step not in self._found:
            block, widths = self.make(step)
            self._found |= {step + place: (block, place, width) for place, width in enumerate(widths)}
        return self._found[step]

    def current(self, step: int, nodes: int) -> Batch:
        """Return the batch of a step for the first nodes, and forget the one before."""
        self._found.pop(step - 1, None)
        return one_step(*self._find(step), nodes)

    def images(self, steps: range, nodes: int, room: int) -> tuple[Tensor, list[int]]:
        """Return the images (nodes, n, C, H, W) of some steps in turn, channels last in memory, and how many each step has.

        Of as many of the steps as have ``room`` images together, but of one at least.
        """
        found, widths = list[tuple[Batch, int]](), list[int]()
        for step in steps:
            block, place, width = self._find(step)
            if widths and sum(widths) + width > room:
                break
            found.append((block, place))
            widths.append(width)
        block, start = found[0]
        size = block.y.shape[2]
        if all(other is block for other, _ in found) and all(width == size for width in widths[:-1]):
            return block.x.flatten(1, 2)[:nodes, start * size : start * size + sum(widths)], widths
        parts = [other.x[:nodes, place, :width] for (other, place), width in zip(found, widths, strict=True)]
        # cat keeps channels last only if it sees them so.
        return torch.cat([part.movedim(2, -1) for part in parts], dim=1).movedim(-1, 2), widths


@dataclass
class Stack:
    """B nodes that train together, sorted by how many steps they take, longest first.

    ``params`` are trained in place; ``received`` are constants of the round; ``memory`` is what the nodes will remember
    and is written in place. Names are the model's tensor names in ``params`` and message names in ``received``.
    """

    nodes: list[int]
    server_round: int
    params: dict[str, Tensor]
    received: dict[str, Tensor]
    memory: dict[str, Tensor]
    num_examples: Tensor  # (B,)
    scratch: dict[str, Tensor] = field(default_factory=dict)  # constants of the round that the node makes itself, with B
    phase: str = ""  # the purpose of the phase that runs
    steps: int = 0  # of the node that takes most in this phase
    step: int = 0
    represented: dict[str, Tensor] = field(default_factory=dict)  # the step's batch under frozen models (B, b, D), by model
    coming: Coming | None = None  # while a phase runs

    def __len__(self) -> int:
        return len(self.nodes)

    def first(self, count: int) -> "Stack":
        """Return the first ``count`` nodes as views: writing to them in place writes to this stack."""
        if count == len(self):
            return self
        cut = {name: value[:count] for name, value in self.params.items()}
        received = {name: value[:count] for name, value in self.received.items()}
        memory = {name: value[:count] for name, value in self.memory.items()}
        return replace(
            self,
            nodes=self.nodes[:count],
            params=cut,
            received=received,
            memory=memory,
            scratch={name: value[:count] for name, value in self.scratch.items()},
            num_examples=self.num_examples[:count],
        )


def draw_batches(
    work: LocalWork, examples: np.ndarray, seed: int, purpose: str, server_round: int, node: int
) -> list[np.ndarray]:
    """Return a node's batches of a round, a pure function of (seed, purpose, round, node)."""
    if not work.steps(len(examples)):  # making a generator takes 40 us, a seventh of such a node
        return []
    return work.batches(examples, generator(seed, purpose, server_round, node))


def draw_dropout(rate: float, width: int, count: int, seed: int, purpose: str, server_round: int, node: int) -> Tensor:
    """Return dropout factors (count, width) for all examples that a node sees in a round, in the order it sees them."""
    rng = torch_generator(seed, f"{purpose} dropout", server_round, node)
    return (torch.rand(count, width, generator=rng) >= rate).float() / (1 - rate)
