"""PMFL, the node half: model contrast against the node's own recent iterates (METHODS section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from clients.base import Client, Tensors
from clients.losses import EPSILON, contrast, cosines, masked_mean
from clients.training.stack import Batch, LocalWork, Stack
from core.config import Range
from core.tensors import group

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
        if not self.config.contrast_weight:
            return {}
        model = group(received, "model")
        size = self.config.buffer_size
        # One zero seen many times: the stack makes its own copy, and a second would cost a new node most of its first round.
        ring = {f"buffer/{n}": v.new_zeros(()).expand(size, *v.shape) for n, v in model.items()} if size else {}
        previous = {f"previous/{n}": v for n, v in model.items()} if self._needs_previous else {}
        pushed = torch.zeros((), dtype=torch.int64, device=self.workspace.device)
        return ring | previous | {"pushed": pushed, "rounds": pushed}

    @property
    def _contrasts(self) -> bool:
        return bool(self.config.contrast_weight and self.config.buffer_size)

    @property
    def _needs_previous(self) -> bool:
        return self.config.threshold in ("previous", "node")

    def start(self, stack: Stack) -> None:
        """Empty the buffer where it does not span rounds, and learn how full it is."""
        # By step, representations (B, b, D) of its batch under the history, newest first.
        self.history: dict[int, list[Tensor]] = {}
        if not self.config.contrast_weight:
            return
        if self.config.buffer_scope == "within":
            stack.memory["pushed"].zero_()
        # An accelerator is waited for here, once a round, and not where the buffer is read and written.
        self.pushed, self.rounds = torch.stack([stack.memory["pushed"], stack.memory["rounds"]]).tolist()
        self.ages = torch.arange(1 + self.config.buffer_size, device=self.workspace.device)
        self.of_history = self.ages > 0  # the first is Z

    def frozen_models(self, stack: Stack) -> Mapping[str, Tensors]:
        """The received model, which gives Z, and, where mu needs it, the node's last local model."""
        if not self._contrasts:
            return {}
        previous = {"previous": {n: stack.memory[f"previous/{n}"] for n in stack.params}} if self._needs_previous else {}
        return {"received": self.global_model(stack)} | previous

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """Directions of the frozen representations: first Z, then the history, newest first (B, b, 1 + n, D); which are of the
        history (B, 1 + n); mu (B, b); and, unless every node has them all, which do not exist (B, 1 + n).
        """
        if not self._contrasts:
            return {}
        if stack.step == 0 and self.config.buffer_scope == "across":
            self._look_back(stack)
        nodes, anchor = len(stack), stack.represented["received"]
        history = [z[:nodes] for z in self.history.pop(stack.step, [])]
        if 1 <= stack.step <= self.config.buffer_size:
            # The received model is in the buffer still: it is what the round's first step started from.
            history.insert(stack.step - 1, anchor)
        pushed = [count + stack.step for count in self.pushed[:nodes]]
        del history[max(pushed) :]  # of nodes that have left
        frozen = [anchor, *history]
        if self._needs_previous:
            frozen.append(stack.represented["previous"])
        # Nothing here has a gradient: ``unit`` would be two operations more.
        directions = F.normalize(torch.stack(frozen, dim=2), dim=-1, eps=EPSILON)
        if self._needs_previous:
            mu = (directions[:, :, -1] * directions[:, :, 0]).sum(-1)
            if self.config.threshold == "node":
                mean = (mu * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
                mu = mean.expand_as(mu)
            if not all(self.rounds[:nodes]):
                mu = torch.where(stack.memory["rounds"].unsqueeze(1) > 0, mu, 1.0)
        else:
            mu = torch.full_like(batch.mask, self.config.threshold_value if self.config.threshold == "constant" else 1.0)
        count = 1 + len(history)
        found = {"directions": directions[:, :, :count], "history": self.of_history[:count].expand(nodes, -1), "mu": mu}
        if min(pushed) < len(history):
            found["missing"] = self.ages[:count] > stack.memory["pushed"].unsqueeze(1)
        return found

    def _look_back(self, stack: Stack) -> None:
        """Represent, under each buffered iterate, the batches of the steps until it is replaced."""
        size, pushed = self.config.buffer_size, self.pushed[: len(stack)]
        ring, device = group(stack.memory, "buffer"), self.workspace.device
        ages = range(1, min(size, max(pushed)) + 1)
        if len(stack) == 1 and device.type == "cpu":
            # From the longest look ahead to the shortest, so that images are laid out once.
            for age in ages:
                iterate = {n: v[:, (pushed[0] - age) % size] for n, v in ring.items()}
                for step, z in enumerate(self.embed_ahead(stack, iterate, 0, size - age + 1)):
                    self.history.setdefault(step, []).append(z)
        elif ages:
            # One call of all of them at all of these steps, though the older ones are not needed at the later steps.
            slots = torch.tensor([[(count - age) % size for age in ages] for count in pushed], device=device)
            place = torch.arange(len(slots), device=device).unsqueeze(1), slots
            for step, z in enumerate(self.embed_ahead(stack, ring, 0, size, several=True)):
                self.history[step] = list(z[place].unbind(1)[: size - step])

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the contrast; without a buffer the contrast is identically 0."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        if not constants:
            return {"loss": task}
        similarity = cosines(features.z, constants["directions"])  # (b, 1 + n)
        mu = similarity[:, 0] if self.config.threshold == "current" else constants["mu"]
        far = constants["history"] & (similarity < mu.unsqueeze(1) - TIE)  # Z is always a positive
        l_con = masked_mean(contrast(similarity / self.config.temperature, far, constants.get("missing")), batch.mask)
        return {"loss": task + self.config.contrast_weight * l_con, "task": task, "contrast": l_con}

    def before_step(self, stack: Stack, losses: dict[str, Tensor]) -> None:
        """Push the iterate that this step starts from, and represent the batches of the steps that will compare with it."""
        if not self._contrasts:
            return
        size, pushed = self.config.buffer_size, stack.memory["pushed"]
        slots = {(count + stack.step) % size for count in self.pushed[: len(stack)]}
        ring = [stack.memory[f"buffer/{name}"] for name in stack.params]
        if len(slots) == 1:
            slot = slots.pop()
            torch._foreach_copy_([buffer[:, slot] for buffer in ring], list(stack.params.values()))
        else:
            place = torch.arange(len(stack), device=pushed.device), pushed % size
            for buffer, value in zip(ring, stack.params.values(), strict=True):
                buffer[place] = value
        pushed += 1
        if stack.step > 0:  # the first is the received model, whose representations there are already
            following = stack.step + 1
            for step, z in enumerate(self.embed_ahead(stack, stack.params, following, size), following):
                self.history.setdefault(step, []).insert(0, z)

    def finish(self, stack: Stack) -> Tensors:
        """Remember the last local model and send the change Delta = w_end - W."""
        if self.config.contrast_weight:
            stack.memory["rounds"] += 1
            if self._needs_previous:
                stack.memory |= {f"previous/{n}": v for n, v in stack.params.items()}
        return super().finish(stack)

    upload = "delta"
