"""FedCRL and FedCoSR, the node half: contrast with global prototypes, blend of own and global body (METHODS section 1)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from clients.base import PARTS, Client, Shapes, Tensors
from clients.losses import masked_mean, unit
from clients.prototypes import with_prototypes
from clients.training.stack import Batch, LocalWork, Stack
from core.config import Range
from core.tensors import group
from models.base import SplitModel


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the node half; the paper's symbol beside each."""

    local: LocalWork
    contrast_weight: Annotated[float, Range(ge=0)]  # alpha; 0: w/o CRL
    temperature: Annotated[float, Range(gt=0)]  # tau_CL
    blend_rate: Annotated[float, Range(ge=0)]  # gamma
    blend: Literal["loss", "global", "own"]  # tau by the loss; 0: w/o LA; 1
    blend_without_contrast: Literal["evaluate", "zero"]  # tau when contrast_weight is 0
    separate: bool  # whether the classifier is personal; false: w/o Sep
    tau_source: Literal["train_mean", "on_receipt"]  # which contrastive loss sets tau
    first_tau: Literal["evaluate", "zero", "one"]  # tau before a contrastive loss was seen in training
    clip: Literal["none", "literal"]  # Algorithm 1 line 22; literal clips every weight into [0, 1]


class FedCRLClient(Client):
    """Body := tau own + (1 - tau) global, then cross-entropy + alpha L_Reg over body and personal head (Equations 7-14).

    tau = e^(-gamma L_Reg) with the contrastive loss of the node's last participation: a large loss takes the global body.
    L_Reg contrasts each example's representation with the global prototype of its class (positive) and those of all other
    classes (negatives): ``-log(e^(cos(w, W_c)/T) / sum_c' e^(cos(w, W_c')/T))``; classes nobody has held are masked.
    Deviations: "clip it into [0,1]" is not applied to the weights; a node's first participation is the paper's initial round.
    """

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Encoder and projector travel; without separation the classifier as well."""
        return PARTS[:2] if config.separate else PARTS

    @classmethod
    def messages(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """The shared parts both ways; prototypes with validity down, with counts up."""
        return with_prototypes(model, *super().messages(model, config))

    def fresh_memory(self, received: Tensors) -> Tensors:
        """No own body yet, and no contrastive loss."""
        shared = group(received, "model")
        zero = torch.zeros((), dtype=self.workspace.dtype, device=self.workspace.device)
        return {f"own/{n}": v for n, v in shared.items()} | {"contrast": zero, "contrasted": zero, "rounds": zero}

    def start(self, stack: Stack) -> None:
        """Blend the own body with the received one (Equations 7-9); the first time, take the received one whole."""
        memory = stack.memory
        tau = self._tau(stack)
        tau = torch.where(memory["rounds"] > 0, tau, torch.zeros_like(tau))
        for name, value in stack.params.items():
            if self._travels(name):
                weight = tau.view(-1, *[1] * (value.dim() - 1))
                blended = weight * memory[f"own/{name}"] + (1 - weight) * stack.received[f"model/{name}"]
                value.copy_(blended)
        work, counts = self.config.local, stack.num_examples.tolist()
        stack.scratch = {
            "tau": tau,
            "batch": stack.num_examples.new_tensor([work.batch_of(n) for n in counts]),
            "last_epoch": stack.num_examples.new_tensor([work.steps_per_pass(n) * ((work.epochs or 1) - 1) for n in counts]),
        }
        memory["sum"], memory["seen"] = torch.zeros_like(tau), torch.zeros_like(tau)

    def _tau(self, stack: Stack) -> Tensor:
        """Return tau (B,) of nodes that have trained before."""
        last = stack.memory["contrast"]
        if self.config.blend == "global":
            return torch.zeros_like(last)
        if self.config.blend == "own":
            return torch.ones_like(last)
        if self.config.contrast_weight == 0 and self.config.blend_without_contrast == "zero":
            return torch.zeros_like(last)
        unseen = stack.memory["contrasted"] == 0
        if self.config.tau_source == "on_receipt" or (bool(unseen.any()) and self.config.first_tau == "evaluate"):
            own = {n: stack.memory[f"own/{n}"] if self._travels(n) else v for n, v in stack.params.items()}
            now = self._contrast_over_examples(stack, own)
            last = now if self.config.tau_source == "on_receipt" else torch.where(unseen, now, last)
        tau = torch.exp(-self.config.blend_rate * last)
        if self.config.tau_source == "train_mean" and self.config.first_tau != "evaluate":
            tau = torch.where(unseen, float(self.config.first_tau == "one"), tau)
        return tau

    def _contrast_over_examples(self, stack: Stack, params: Tensors) -> Tensor:
        """Return the mean contrastive loss (B,) of models over each node's training part, in evaluation mode."""

        def sums(params: Tensors, batch: Batch, table: Tensors) -> Tensors:
            with self.model.holding(params) as model:
                z = model(batch.x).z
            return {"sum": (self._each(z, batch.y, table) * batch.mask).sum()}

        return self.over_examples(stack, sums, params, self._table(stack))["sum"] / stack.num_examples

    @staticmethod
    def _table(stack: Stack) -> Tensors:
        return {"means": stack.received["proto/mean"], "valid": stack.received["proto/valid"]}

    def _each(self, z: Tensor, y: Tensor, table: Tensors) -> Tensor:
        """Return L_Reg of each example (b,) from representations (b, D); 0 where the class has no prototype."""
        scores = unit(z) @ unit(table["means"]).T / self.config.temperature
        valid = table["valid"] > 0
        low = torch.finfo(scores.dtype).min / 4
        every = torch.logsumexp(scores.masked_fill(~valid, low), dim=1)
        own = scores.gather(1, y.unsqueeze(1)).squeeze(1)
        return torch.where(valid[y], every - own, torch.zeros_like(own))

    def constants(self, stack: Stack, batch: Batch) -> Tensors:
        """The prototypes (B, C, D) and which exist (B, C)."""
        return self._table(stack)

    def loss(self, params: Tensors, batch: Batch, constants: Tensors) -> dict[str, Tensor]:
        """Cross-entropy and the contrastive loss; the latter does not reach the head."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        contrast = masked_mean(self._each(features.z, batch.y, constants), batch.mask)
        return {"loss": task + self.config.contrast_weight * contrast, "task": task, "contrast": contrast}

    def before_step(self, stack: Stack, losses: dict[str, Tensor]) -> None:
        """Gather the contrastive loss of the last local epoch, by examples."""
        batch, place = stack.scratch["batch"], stack.step - stack.scratch["last_epoch"]
        if self.config.local.epochs is None:
            weight = torch.minimum(stack.num_examples, batch)
        else:
            weight = torch.minimum(stack.num_examples - place * batch, batch).clamp_min(0) * (place >= 0)
        stack.memory["sum"] += losses["contrast"] * weight
        stack.memory["seen"] += weight

    def finish(self, stack: Stack) -> Tensors:
        """Remember the trained body and the contrastive loss; send body and prototypes (Equation 3)."""
        memory = stack.memory
        if self.config.clip == "literal":
            for value in stack.params.values():
                value.data.clamp_(0, 1)
        mean = memory.pop("sum") / memory.pop("seen").clamp_min(1)
        known = (stack.received["proto/valid"] > 0).any(1).to(mean)
        memory["contrast"] = mean
        memory["contrasted"] = known  # a loss against no prototypes says nothing
        memory["rounds"] = memory["rounds"] + 1
        memory |= {f"own/{n}": v for n, v in stack.params.items() if self._travels(n)}
        means, counts = self.prototypes(stack)
        return super().finish(stack) | {"proto/mean": means, "proto/count": counts}

    def judged_model(self, received: Tensors, memory: Tensors) -> Tensors:
        """A node is judged by its own body and head as it last trained them (post_train)."""
        own = {f"model/{n.removeprefix('own/')}": v for n, v in memory.items() if n.startswith("own/")}
        return super().judged_model(received | own, memory)
