"""Apply torch's optimisers to tensors with a client axis."""

from itertools import groupby

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from contrafed.core.tensors import Tensors
from contrafed.training.local_training import LocalTraining

BETAS, EPSILON = (0.9, 0.999), 1e-8  # torch.optim.Adam's defaults


class Optimizer:
    """SGD or Adam. Both work element by element, so clients with one learning rate and step count share a call.

    ``state`` holds momenta (B, ...) by ``KIND/NAME``. A client's learning rate follows its own epoch.
    """

    def __init__(
        self, local_training: LocalTraining, server_round: int, sizes: list[int], params: Tensors, kept: Tensors
    ) -> None:
        """Prepare to optimise ``params``.

        Args:
            local_training: Settings of the training.
            server_round: The 1-based round.
            sizes: Each client's number of examples.
            params: Tensors (B, ...).
            kept: State of an earlier round to continue from, or empty.
        """
        self.local_training, self.server_round = local_training, server_round
        self.passes = [local_training.steps_per_pass(size) for size in sizes]
        self.kinds = (
            ("first", "second") if local_training.optimizer == "adam" else ("momentum",) if local_training.momentum else ()
        )
        self.state: Tensors = {}
        for kind in self.kinds:
            for name, value in params.items():
                key = f"{kind}/{name}"
                self.state[key] = kept[key] if key in kept else torch.zeros_like(value)
        self.taken: list[int] = kept["taken"].tolist() if "taken" in kept else [0] * len(sizes)

    def step(self, params: Tensors, step: int) -> None:
        """Move the first clients' ``params``, leaves (B, ...) with gradients. A leaf without a gradient stays."""
        names = [name for name, leaf in params.items() if leaf.grad is not None]
        count = len(next(iter(params.values())))
        clocks = [(self.local_training.rate(self.server_round, step // self.passes[k]), self.taken[k]) for k in range(count)]
        for (rate, taken), same in groupby(range(count), clocks.__getitem__):
            rows = list(same)
            part = slice(rows[0], rows[-1] + 1)
            leaves = [params[name].detach()[part] for name in names]
            grads = [grad[part] for name in names if (grad := params[name].grad) is not None]
            state = [[self.state[f"{kind}/{name}"][part] for name in names] for kind in self.kinds]
            if self.local_training.optimizer == "adam":
                self._adam(leaves, grads, state, rate, taken)
            else:
                self._sgd(leaves, grads, state, rate)
        self.taken[:count] = [taken + 1 for taken in self.taken[:count]]

    def _sgd(self, leaves: list[torch.Tensor], grads: list[torch.Tensor], state: list[list[torch.Tensor]], rate: float) -> None:
        sgd(
            leaves,
            grads,
            list(state[0]) if state else [None] * len(leaves),
            lr=rate,
            momentum=self.local_training.momentum,
            weight_decay=self.local_training.weight_decay,
            dampening=0,
            nesterov=False,
            maximize=False,
        )

    def _adam(
        self, leaves: list[torch.Tensor], grads: list[torch.Tensor], state: list[list[torch.Tensor]], rate: float, taken: int
    ) -> None:
        first, second = state
        taken_each = [torch.tensor(float(taken)) for _ in leaves]
        adam(
            leaves,
            grads,
            first,
            second,
            [],
            taken_each,
            lr=rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            eps=EPSILON,
            weight_decay=self.local_training.weight_decay,
            amsgrad=False,
            maximize=False,
        )

    def export_state(self) -> Tensors:
        """Return the optimiser's part of the client state, with a leading B."""
        return self.state | {"taken": torch.tensor(self.taken)}
