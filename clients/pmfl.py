"""PMFL, the node half: model contrast against the node's own recent iterates (METHODS section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clients.base import Client, Tensors
from clients.losses import contrast, cosines, masked_mean, unit
from clients.stack import Batch, LocalWork, Stack
from contrafed.config import Range
from contrafed.tensors import group

# Where one unit alone is active, two representations are parallel and their cosine is 1 up to rounding: this much below the
# threshold still counts as reaching it, so that such ties do not fall differently on another device or in another stack.
TIE = 1e-6


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalWork
    contrast_weight: Annotated[float, Range(ge=0)]  # lambda; 0 is the ablation w/o MCT
    temperature: Annotated[float, Range(gt=0)]  # tau
    buffer_size: Annotated[int, Range(ge=0)]  # N
    buffer_scope: Literal["across", "within"]  # whether the buffer spans rounds
    threshold: Literal["previous", "literal", "current", "node", "constant"]  # mu
    threshold_value: Annotated[float, Range(ge=-1, le=1)]  # mu for threshold=constant


class PMFLClient(Client):
    """Cross-entropy + lambda * l_con, the contrast of Equation 5.

    With z the batch's representation under the model in training, Z under the received model and z_j under the N buffered
    iterates, ``l_con = -log(pos / (pos + neg))``, pos = e^(cos(z,Z)/tau) + sum over {j: cos(z,z_j) >= mu} e^(cos(z,z_j)/tau)
    and neg the same sum over the other j. The sorting is per example, redone at each step, and carries no gradient.
    The buffer holds the iterates that the last N steps started from, across the rounds in which the node took part.

    Deviation: the paper's threshold mu = cos(z_k^{tE}, Z^t) is 1 by its own definition of w_k^{tE}; ``threshold`` selects
    the reading. ``previous`` (default) takes the node's last local model for z_k^{tE}, and 1 in its first round;
    ``literal`` is 1; ``current`` is cos(z, Z); ``node`` averages ``previous`` over the batch; ``constant`` is a number.
    A similarity within 1e-6 of the threshold reaches it.
    """

    def fresh_memory(self, received: Tensors) -> Tensors:
        """An empty ring of N models, the number of iterates ever pushed into it, and a previous local model."""
        if not self.hyper.contrast_weight:
            return {}
        model = group(received, "model")
        size = self.hyper.buffer_size
        # One zero seen many times: the stack makes its own copy, and a second would cost a new node most of its first round.
        ring = {f"buffer/{n}": v.new_zeros(()).expand(size, *v.shape) for n, v in model.items()} if size else {}
        previous = {f"previous/{n}": v for n, v in model.items()} if self._needs_previous else {}
        pushed = torch.zeros((), dtype=torch.int64, device=self.site.device)
        return ring | previous | {"pushed": pushed, "rounds": pushed}

    @property
    def _contrasts(self) -> bool:
        return bool(self.hyper.contrast_weight and self.hyper.buffer_size)

    @property
    def _needs_previous(self) -> bool:
        return self.hyper.threshold in ("previous", "node")

    def start(self, stack: Stack) -> None:
        """Empty the buffer where it does not span rounds."""
        # By step, representations of its batch under the iterate in each slot of the buffer (B, N, b, D).
        self.seen: dict[int, Tensor] = {}
        if self._contrasts and self.hyper.buffer_scope == "within":
            stack.memory["pushed"].zero_()

    def frozen_models(self, stack: Stack) -> Mapping[str, Tensors]:
        """The received model, which gives Z, and, where mu needs it, the node's last local model."""
        if not self._contrasts:
            return {}
        previous = {"previous": {n: stack.memory[f"previous/{n}"] for n in stack.params}} if self._needs_previous else {}
        return {"received": self.global_model(stack)} | previous

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """Directions of the frozen representations: first Z, then the history (B, 1 + n, b, D); which of these is Z, and
        which exist (B, 1 + n); and mu (B, b).
        """
        if not self._contrasts:
            return {}
        if stack.step == 0 and self.hyper.buffer_scope == "across":
            self._look_back(stack)
        pushed, anchor = stack.memory["pushed"], stack.represented["received"]
        if 1 <= stack.step <= self.hyper.buffer_size:
            # The received model is in the buffer still: it is what the round's first step started from.
            self._see(stack.step, self._place(stack, stack.step), anchor)
        frozen, known = [anchor.unsqueeze(1)], 0
        if stack.step in self.seen:
            known = self._filled(pushed)
            frozen.append(self.seen.pop(stack.step)[: len(stack), :known])
        if self._needs_previous:
            frozen.append(stack.represented["previous"].unsqueeze(1))
        directions = unit(torch.cat(frozen, dim=1))
        if self._needs_previous:
            mu = (directions[:, -1] * directions[:, 0]).sum(-1)
            if self.hyper.threshold == "node":
                mean = (mu * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
                mu = mean.expand_as(mu)
            mu = torch.where(stack.memory["rounds"].unsqueeze(1) > 0, mu, 1.0)
        else:
            mu = torch.full_like(batch.mask, self.hyper.threshold_value if self.hyper.threshold == "constant" else 1.0)
        slots = torch.arange(-1, known, device=mu.device)
        exists = slots < pushed.unsqueeze(1)
        directions = directions[:, : 1 + known]
        return {"directions": directions, "first": (slots < 0).expand_as(exists), "exists": exists, "mu": mu}

    def _look_back(self, stack: Stack) -> None:
        """Represent, under each buffered iterate, the batches of the steps until it is replaced."""
        size = self.hyper.buffer_size
        # From the longest look ahead to the shortest, so that images are laid out once.
        for age in range(1, self._filled(stack.memory["pushed"]) + 1):
            place = self._place(stack, age)
            iterate = {n: stack.memory[f"buffer/{n}"][place] for n in stack.params}
            for step, z in enumerate(self.embed_ahead(stack, iterate, 0, size - age + 1)):
                self._see(step, place, z)

    def _see(self, step: int, place: tuple[Any, Any], z: Tensor) -> None:
        """Keep representations (B, b, D) of a step's batch under the iterate at ``place``."""
        if step not in self.seen:
            self.seen[step] = z.new_zeros(len(z), self.hyper.buffer_size, *z.shape[1:])
        self.seen[step][: len(z)][place] = z

    def _filled(self, pushed: Tensor) -> int:
        """How many slots some node has filled; on an accelerator all, since asking would mean waiting for it."""
        size: int = self.hyper.buffer_size
        return min(size, int(pushed.max())) if pushed.device.type == "cpu" else size

    def _place(self, stack: Stack, age: int) -> tuple[Any, Any]:
        """Where a buffer has the iterate of ``age`` steps ago, or, for 0, where the next one goes."""
        pushed, size = stack.memory["pushed"], self.hyper.buffer_size
        if len(stack) == 1 and pushed.device.type == "cpu":
            return slice(None), (int(pushed) - age) % size  # a plain copy, no scatter; an accelerator would be waited for
        return torch.arange(len(stack), device=pushed.device), (pushed - age) % size

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the contrast; without a buffer the contrast is identically 0."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        if not constants:
            return {"loss": task}
        similarity = cosines(features.z, constants["directions"])  # (b, 1 + n)
        mu = similarity[:, 0].detach() if self.hyper.threshold == "current" else constants["mu"]
        near = constants["first"] | (similarity.detach() >= mu.unsqueeze(1) - TIE)  # Z is always a positive
        exists = constants["exists"]
        l_con = contrast(similarity / self.hyper.temperature, near & exists, ~near & exists)
        l_con = masked_mean(l_con, batch.mask)
        return {"loss": task + self.hyper.contrast_weight * l_con, "task": task, "contrast": l_con}

    def before_step(self, stack: Stack, losses: dict[str, Tensor]) -> None:
        """Push the iterate that this step starts from, and represent the batches of the steps that will compare with it."""
        if not self._contrasts:
            return
        place, iterate = self._place(stack, 0), {n: v.detach() for n, v in stack.params.items()}
        for name, value in iterate.items():
            stack.memory[f"buffer/{name}"][place] = value
        stack.memory["pushed"] += 1
        if stack.step > 0:  # the first is the received model, whose representations there are already
            following = stack.step + 1
            for step, z in enumerate(self.embed_ahead(stack, iterate, following, self.hyper.buffer_size), following):
                self._see(step, place, z)

    def finish(self, stack: Stack) -> Tensors:
        """Remember the last local model and send the change Delta = w_end - W."""
        if self.hyper.contrast_weight:
            stack.memory["rounds"] += 1
            if self._needs_previous:
                stack.memory |= {f"previous/{n}": v for n, v in stack.params.items()}
        return super().finish(stack)

    upload = "delta"
