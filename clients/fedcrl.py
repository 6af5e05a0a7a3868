"""FedCRL's and FedCoSR's client: contrast with global prototypes, and blend of own and global body."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.core.split_model import SplitModel
from contrafed.core.tensors import add_prefix, select_prefix
from contrafed.training.base import PARTS, Batch, Client, ClientStack, LocalTraining, Losses, Shapes, Tensors, expand_like
from contrafed.training.losses import masked_mean, prototype_contrast
from contrafed.training.prototypes import prototype_table, with_prototypes

# Of keys that only a blend by the loss reads.
BY_LOSS = OnlyWith("blend", "loss")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    contrast_weight: Annotated[float, Range(ge=0)]  # alpha. 0: w/o CRL
    temperature: Annotated[float, Range(gt=0)]  # tau_CL
    blend_rate: Annotated[float, Range(ge=0), BY_LOSS]  # gamma
    blend: Literal["loss", "global", "own"]  # loss: tau by the loss. global: tau = 0, w/o LA. own: tau = 1
    blend_without_contrast: Annotated[Literal["evaluate", "zero"], OnlyWith("contrast_weight", 0)]  # tau without contrast
    separate: bool  # whether the classifier is personal. false: w/o Sep
    tau_source: Annotated[Literal["train_mean", "on_receipt"], BY_LOSS]  # which contrastive loss sets tau
    first_tau: Annotated[Literal["evaluate", "zero", "one"], BY_LOSS, OnlyWith("tau_source", "train_mean")]  # tau at first
    clip: Literal["none", "literal"]  # Algorithm 1 line 22. literal: clip every weight into [0, 1]


class FedCRLClient(Client):
    """Blend the own and the global body, then minimise cross-entropy + alpha L_Reg (Equations 7-14).

    Body := tau own + (1 - tau) global, with tau = e^(-gamma L_Reg). A large loss takes the global body. L_Reg in tau is the
    contrastive loss of the client's last participation.

    L_Reg contrasts each example's representation with the global prototypes. The prototype of its class is the positive. Those
    of all other classes are the negatives: ``-log(e^(cos(w, W_c)/T) / sum_c' e^(cos(w, W_c')/T))``. Classes without any holder
    so far are masked. An example whose class has no prototype adds 0 to the training loss and is left out of the loss that sets
    tau.

    Source: Huang et al. 2024 (FedCRL, arXiv:2404.17916v1). FedCoSR is its journal version (arXiv:2404.17916).

    Deviation: "clip it into [0,1]" is not applied to the weights.

    Interpretation: a client's first participation is the paper's initial round, so its tau is 0. The contrast counts as soon
    as there are prototypes.

    Body: encoder and projector. Head: classifier.
    """

    family = "personal, with prototypes"
    paper = Paper(
        authors="Huang, Chen, Zhang and Wang",
        title=(
            "FedCRL: Personalized Federated Learning with Contrastive Shared Representations for Label "
            "Heterogeneity in Non-IID Data"
        ),
        where="arXiv, 2024",
        url="https://arxiv.org/abs/2404.17916v1",
    )
    papers_of_variants: ClassVar[Mapping[str, Paper]] = {
        "fedcosr": Paper(
            authors="Huang, Chen, Zhang and Wang",
            title=(
                "FedCoSR: Personalized Federated Learning with Contrastive Shareable Representations for Label "
                "Heterogeneity in Non-IID Data"
            ),
            where="IEEE Transactions on Cybernetics, 2025",
            url="https://arxiv.org/abs/2404.17916",
        ),
    }
    traffic = ("phi omega", "phi omega")
    own_model = True
    loss_names = ("task", "contrast", "contrasted")

    @classmethod
    def shared_parts(cls, config: Any) -> tuple[str, ...]:
        """Return encoder and projector, and without separation the classifier too."""
        return PARTS[:2] if config.separate else PARTS

    @classmethod
    def message_spec(cls, model: SplitModel, config: Any) -> tuple[Shapes, Shapes]:
        """Return the shared parts in both directions, prototypes with validity down, and prototypes with counts up."""
        return with_prototypes(model, *super().message_spec(model, config))

    def init_client_state(self, received: Tensors) -> Tensors:
        """Return a client state without an own body or a contrastive loss."""
        shared = self.shared_of(select_prefix(received, "model"))
        zero = torch.zeros((), dtype=self.workspace.dtype, device=self.workspace.device)
        return add_prefix("own", shared) | {"contrast": zero, "has_contrast": zero, "participations": zero}

    def local_update(self, stack: ClientStack) -> Tensors:
        """Blend, train with the global prototypes, keep body and loss, and upload body and prototypes (Equations 3, 7-14)."""
        self._blend(stack)
        losses = self.train(stack, loss_inputs=prototype_table(stack))
        if self.config.clip == "literal":
            for value in self.parameters_of(stack.params).values():
                value.data.clamp_(0, 1)
        self._store_state(stack, losses)
        return self.make_upload(stack) | self.prototypes(stack)

    def _blend(self, stack: ClientStack) -> None:
        """Blend the previous body with the received one (Equations 7 and 8). The first time, take the received one.

        Equation 9, the personal head, needs nothing here: the head in ``stack.params`` is the client's own.
        """
        tau = torch.where(stack.state["participations"] > 0, self._choose_tau(stack), 0.0)
        for name, previous_body in select_prefix(stack.state, "own").items():
            weight = expand_like(tau, previous_body)
            stack.params[name].copy_(weight * previous_body + (1 - weight) * stack.received[f"model/{name}"])

    def _choose_tau(self, stack: ClientStack) -> Tensor:
        """Return tau = e^(-gamma L_Reg) (B,) of clients that have trained before."""
        config, last_loss = self.config, stack.state["contrast"]
        if config.blend == "own":
            return torch.ones_like(last_loss)
        if config.blend == "global" or (config.contrast_weight == 0 and config.blend_without_contrast == "zero"):
            return torch.zeros_like(last_loss)
        if config.tau_source == "on_receipt":
            return self._compute_tau(self._evaluate_contrast(stack))
        unseen = stack.state["has_contrast"] == 0
        if config.first_tau != "evaluate":
            return torch.where(unseen, 1.0 if config.first_tau == "one" else 0.0, self._compute_tau(last_loss))
        return self._compute_tau(torch.where(unseen, self._evaluate_contrast(stack), last_loss) if unseen.any() else last_loss)

    def _compute_tau(self, loss: Tensor) -> Tensor:
        """Return tau (B,) of losses (B,), and 0 for one that is infinite."""
        return torch.where(loss.isinf(), 0.0, torch.exp(-self.config.blend_rate * loss))

    def _evaluate_contrast(self, stack: ClientStack) -> Tensor:
        """Return the mean contrastive loss (B,) of previous bodies over each client's training part, in evaluation mode.

        The mean is over the examples whose class has a prototype. It is infinite without any, so that the client takes the
        global body.
        """

        def sums(params: Tensors, batch: Batch, prototypes: Tensors) -> Tensors:
            with self.model.holding(params) as model:
                z = model.represent(batch.x)
            has_prototype = prototypes["valid"][batch.y] * batch.mask
            contrast = self._compute_contrast(z, batch.y, prototypes)
            return {"sum": (contrast * has_prototype).sum(), "count": has_prototype.sum()}

        previous = {n: stack.state[f"own/{n}"] if self.is_shared(n) else v for n, v in stack.params.items()}
        totals = self.over_examples(stack, sums, previous, prototype_table(stack))
        return torch.where(totals["count"] > 0, totals["sum"] / totals["count"].clamp_min(1), torch.inf)

    def _compute_contrast(self, z: Tensor, y: Tensor, prototypes: Tensors) -> Tensor:
        """Return L_Reg of each example (b,) from representations (b, D), and 0 for a class without a prototype."""
        return prototype_contrast(z, y, prototypes["means"], prototypes["valid"], self.config.temperature)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted contrastive loss, which has no gradient in the head."""
        features = self.forward(params, batch)
        task = self.task_loss(features, batch)
        contrast = masked_mean(self._compute_contrast(features.z, batch.y, loss_inputs), batch.mask)
        fraction = masked_mean(loss_inputs["valid"][batch.y], batch.mask)
        loss = task + self.config.contrast_weight * contrast
        return {"loss": loss, "task": task, "contrast": contrast, "contrasted": fraction}

    def _store_state(self, stack: ClientStack, losses: Losses) -> None:
        """Keep the trained body and the contrastive loss of the last local epoch as client state."""
        state, local_training = stack.state, self.config.local
        last_steps = [
            local_training.steps_per_pass(size) if local_training.epochs is not None else local_training.steps(size)
            for size in stack.sizes
        ]
        contrast, fraction = losses.mean("contrast", last_steps), losses.mean("contrasted", last_steps)
        state["contrast"] = torch.where(fraction > 0, contrast / torch.where(fraction > 0, fraction, 1.0), 0.0)
        state["has_contrast"] = (fraction > 0).to(contrast)
        state["participations"] = state["participations"] + 1
        state |= add_prefix("own", self.shared_of(stack.params))

    def eval_models(self, stack: ClientStack) -> dict[str, Tensors]:
        """Return the body and head that the client last trained."""
        return {"model": stack.params | select_prefix(stack.state, "own")}
