"""The library's optimisers over a stack of nodes."""

from typing import Any

import torch
from torch import Tensor

from clients.training.stack import LocalWork, Stack
from core.tensors import Tensors


class StackedOptimizer:
    """One optimiser over tensors with a node axis: exact, since SGD and Adam act element by element."""

    def __init__(self, work: LocalWork, purpose: str, stack: Stack) -> None:
        self.work, self.server_round = work, stack.server_round
        self._optimizer: torch.optim.Optimizer | None = None

    def cut(self, params: Tensors) -> None:
        """Go on with ``params``, leaves over the first rows of those before."""
        old, leaves = self._optimizer, list(params.values())
        new = self._optimizer = self.work.optimizer_for(leaves, self.server_round)
        if old is None:
            return
        for before, after in zip(old.param_groups[0]["params"], leaves, strict=True):
            new.state[after] = {
                k: v[: len(after)].clone() if isinstance(v, Tensor) and v.dim() == before.dim() and v.dim() > 0 else v
                for k, v in old.state.get(before, {}).items()
            }

    def step(self, step: int) -> None:
        """Update every node's parameters."""
        assert self._optimizer is not None
        self._optimizer.step()

    def state(self) -> Tensors:
        """Nothing is kept: such optimisers would differ in their number of steps."""
        return {}


class OwnClocks:
    """One optimiser per node, over views of its rows: for learning rates and optimiser states that differ by node.

    With ``keep_optimizer`` a node's state is what ``stack.memory`` has of it, as ``optimizer/PURPOSE/KEY/PARAMETER``.
    """

    def __init__(self, work: LocalWork, purpose: str, stack: Stack) -> None:
        self.work, self.server_round, self.prefix = work, stack.server_round, f"optimizer/{purpose}/"
        self.passes = [work.steps_per_pass(int(n)) for n in stack.num_examples.tolist()]
        self.memory = {n: v for n, v in stack.memory.items() if n.startswith(self.prefix)} if work.keep_optimizer else {}
        self.params: Tensors = {}
        self.rows: list[Tensors] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def cut(self, params: Tensors) -> None:
        """Go on with ``params``, leaves over the first rows of those before."""
        self.params = params
        if self.optimizers:
            return
        for row in range(len(next(iter(params.values())))):
            # Detached views share storage with the stack: a step here is a step there.
            views = {name: value.detach()[row] for name, value in params.items()}
            optimizer = self.work.optimizer_for(list(views.values()), self.server_round)
            for key, value in self.memory.items():
                name, parameter = key.removeprefix(self.prefix).split("/", 1)
                # Adam counts its steps on the host.
                optimizer.state[views[parameter]][name] = value[row].cpu() if name == "step" else value[row].clone()
            self.rows.append(views)
            self.optimizers.append(optimizer)

    def step(self, step: int) -> None:
        """Update the parameters of the nodes that are still there, each at the rate of its own epoch."""
        alive = len(next(iter(self.params.values())))
        for row, optimizer in enumerate(self.optimizers[:alive]):
            optimizer.param_groups[0]["lr"] = self.work.rate(self.server_round, step // self.passes[row])
            for name, view in self.rows[row].items():
                grad = self.params[name].grad
                view.grad = None if grad is None else grad[row]
            optimizer.step()
            optimizer.zero_grad()  # else a view of the whole stack's gradient stays

    def state(self) -> Tensors:
        """Return every node's optimiser state, each with a leading node axis."""
        out: dict[str, Any] = {}
        for views, optimizer in zip(self.rows, self.optimizers, strict=True):
            for name, view in views.items():
                for key, value in optimizer.state.get(view, {}).items():
                    if isinstance(value, Tensor):
                        out.setdefault(f"{self.prefix}{key}/{name}", []).append(value.to(view.device))
        return {name: torch.stack(rows) for name, rows in out.items()}
