"""Settings of local training: how long, with which batches, with which optimiser."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from contrafed.core.errors import UserError
from contrafed.core.rounding import round_up
from contrafed.core.schema import Range

# Why a client that trains in phases cannot stop at a deadline.
SEVERAL_PHASES = "a late client would spend all its steps on the first of several phases"


@dataclass(frozen=True)
class LocalTraining:
    """Settings of a client's local training: how long, with which batches, with which optimiser.

    Exactly one of ``epochs`` (shuffled passes) and ``iterations`` (minibatch steps through successive shuffled passes, every
    batch of the full size, or of all examples of a smaller client) is set. ``last_batch``: what becomes of the short batch at
    the end of each of ``epochs``. It is kept, dropped, or merged with the batch before it. A pass has one batch at least.
    """

    epochs: Annotated[int, Range(ge=0)] | None
    iterations: Annotated[int, Range(ge=0)] | None
    batch_size: Annotated[int, Range(ge=1)] | Annotated[float, Range(gt=0, lt=1)]  # a fraction: of the client's examples
    last_batch: Literal["keep", "drop", "merge"]
    optimizer: Literal["sgd", "adam"]
    lr: Annotated[float, Range(gt=0)]
    lr_decay: Annotated[float, Range(gt=0, le=1)]
    epoch_lr_decay: Annotated[float, Range(gt=0, le=1)]
    momentum: Annotated[float, Range(ge=0, lt=1)]
    weight_decay: Annotated[float, Range(ge=0)]
    proximal_weight: Annotated[float, Range(ge=0)]
    clip_norm: Annotated[float, Range(gt=0)] | None
    keep_optimizer: bool
    augment: tuple[Literal["sharpness", "jitter", "posterize", "equalize", "rotation", "crop", "flip"], ...]
    mixed_precision: bool

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.iterations is None):
            problem = "epochs and iterations are both null. Fix: set one of them"
            if self.epochs is not None:
                problem = f"there is also strategy.local.iterations={self.iterations}. Fix: strategy.local.iterations=null"
            raise UserError(f"strategy.local.epochs: {problem}")
        if twice := [name for name in self.augment if self.augment.count(name) > 1]:
            raise UserError(f"strategy.local.augment: {twice[0]} is there twice. Fix: once")

    def batch_of(self, examples: int) -> int:
        """Return the batch size of a client with ``examples`` examples."""
        if isinstance(self.batch_size, float):
            return max(1, round_up(self.batch_size * examples))
        return self.batch_size

    def steps_per_pass(self, examples: int) -> int:
        """Return how many batches a shuffled pass over ``examples`` examples gives, at least 1."""
        size = self.batch_of(examples)
        if self.epochs is not None and self.last_batch == "keep":
            return max(1, math.ceil(examples / size))
        return max(1, examples // min(size, max(examples, 1)))

    def smallest_batch(self, examples: int) -> int:
        """Return how many examples the smallest batch of a client with so many has."""
        size = min(self.batch_of(examples), examples)
        if self.epochs is None or not size or self.last_batch == "drop":
            return size
        if self.last_batch == "keep":
            return examples % size or size
        return examples if examples < 2 * size else size

    def steps(self, examples: int) -> int:
        """Return the number of optimiser steps of a client with ``examples`` examples, 0 for one without."""
        if not examples:
            return 0
        if self.iterations is not None:
            return self.iterations
        assert self.epochs is not None
        return self.epochs * self.steps_per_pass(examples)

    def batches(self, examples: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw the client's batches of this round: arrays of indices from ``examples`` (n,)."""
        size = self.batch_of(len(examples))
        if self.epochs is not None:
            orders = [rng.permutation(examples) for _ in range(self.epochs)]
            if self.last_batch == "keep":
                return [order[i : i + size] for order in orders for i in range(0, len(order), size)]
            count = self.steps_per_pass(len(examples))
            end = len(examples) if self.last_batch == "merge" or len(examples) < size else count * size
            ends = [*(size * step for step in range(1, count)), end]
            return [order[first:last] for order in orders for first, last in zip([0, *ends], ends, strict=False)]
        assert self.iterations is not None
        size = min(size, len(examples))
        passes = math.ceil(self.iterations / (len(examples) // size))
        whole = len(examples) // size * size
        orders = [rng.permutation(examples)[:whole] for _ in range(passes)]
        return list(np.concatenate(orders).reshape(-1, size)[: self.iterations]) if orders else []

    def rate(self, server_round: int, epoch: int = 0) -> float:
        """Return the learning rate of a 1-based round and a 0-based local epoch: lr * decay^(t-1) * epoch_decay^e."""
        return self.lr * self.lr_decay ** (server_round - 1) * self.epoch_lr_decay**epoch

    def total_rate(self, server_round: int, examples: int) -> float:
        """Return the sum of the learning rates of all steps that a client with ``examples`` examples takes in a round."""
        each = self.steps_per_pass(examples)
        return sum(self.rate(server_round, step // each) for step in range(self.steps(examples)))

    def plain(self, lr: float, epochs: int | None = None, iterations: int | None = None) -> "LocalTraining":
        """Return settings for plain SGD at a constant rate, which may be 0, on the loss alone, with batches of the same
        size.
        """
        return replace(
            self,
            epochs=epochs,
            iterations=iterations,
            optimizer="sgd",
            lr=lr,
            lr_decay=1.0,
            epoch_lr_decay=1.0,
            momentum=0.0,
            weight_decay=0.0,
            proximal_weight=0.0,
            clip_norm=None,
            keep_optimizer=False,
        )
