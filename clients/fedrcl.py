"""FedRCL's client: a relaxed contrastive loss at every level of the network."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.core.errors import UserError
from contrafed.core.paper import Paper
from contrafed.core.schema import OnlyWith, Range
from contrafed.training.base import Batch, Client, ClientStack, LocalTraining, Step, Tensors
from contrafed.training.losses import masked_mean, unit, without

# Of keys that only the contrast reads.
CONTRAST = OnlyWith("contrast_weight")


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the client, each with the paper's symbol."""

    local: LocalTraining
    contrast_weight: Annotated[float, Range(ge=0)]
    penalty_weight: Annotated[float, Range(ge=0), CONTRAST]  # beta, in Equation 5
    negative_weight: Annotated[float, Range(gt=0), CONTRAST]  # beta, in the released code
    temperature: Annotated[float, Range(gt=0), CONTRAST]  # tau
    threshold: Annotated[float, Range(ge=-1), CONTRAST]  # lambda
    pairs: Annotated[Literal["hard", "all"], CONTRAST]  # hard: form C, the released code. all: form P, Equation 5
    hard_negatives: Annotated[int, Range(ge=1), CONTRAST, OnlyWith("pairs", "hard")]
    positive_reduce: Annotated[Literal["sum", "mean"], CONTRAST, OnlyWith("pairs", "all")]
    positives: Annotated[Literal["label", "self"], CONTRAST]
    views: Annotated[int, Range(ge=1, le=2), CONTRAST]  # number of views of each image
    levels: Annotated[Annotated[int, Range(ge=1)] | Literal["last"], CONTRAST]

    def __post_init__(self) -> None:
        """Raise ``UserError`` if the two views of an image would be equal."""
        if self.views == 2 and not self.local.augment:
            raise UserError("strategy.views=2 compares two augmented views of an image, and strategy.local.augment is empty")


class FedRCLClient(Client):
    """Minimise cross-entropy + the mean over levels of a contrastive loss whose attraction ends at a similarity of lambda.

    The cosine compares every level's pooled features within the batch.

    Source: Seo et al. 2024 (FedRCL). ``pairs=all`` is Equation 5. ``pairs=hard`` (default) is what the released code computes,
    which is a different function.

    Deviation: the penalty of Equation 5 is added. Under the printed leading minus it would attract.

    Interpretation: the paper and the released code use beta differently. In the paper and by default here it is the penalty's
    weight (``penalty_weight``). In the released code (``negative_weight``) it adds log(beta) / tau to the logits of negatives
    and of the penalty. At 1 the two are the same.

    ``views=2`` augments every image twice, and the contrast is among 2b examples. The two views of an image are positives of
    each other. With ``positives=self`` they are the only positives. Cross-entropy uses the first view alone.
    """

    family = "contrast"
    paper = Paper(
        authors="Seo, Kim, Kim and Han",
        title="Relaxed Contrastive Learning for Federated Learning",
        where="CVPR 2024",
        url="https://arxiv.org/abs/2401.04928",
    )
    reads_images = True
    loss_names = ("task", "contrast", "penalty")

    def local_update(self, stack: ClientStack) -> Tensors:
        """Train, with a second view of every image if the contrast needs two."""
        two = self.config.views == 2 and self.config.contrast_weight > 0
        self.train(stack, before_step=_second_view if two else None)
        return self.make_upload(stack)

    def loss(self, params: Tensors, batch: Batch, loss_inputs: Tensors) -> dict[str, Tensor]:
        """Return the cross-entropy plus the weighted contrast and penalty."""
        features = self.forward(params, batch, with_levels=self.config.contrast_weight > 0)
        task = self.task_loss(features, batch)
        levels = features.select_levels(self.config.levels)
        if not levels:
            return {"loss": task, "task": task, "contrast": torch.zeros_like(task), "penalty": torch.zeros_like(task)}
        pairs = _hard if self.config.pairs == "hard" else _all
        y, mask, config = batch.y, batch.mask, self.config
        if "view" in loss_inputs:
            other = self.forward(params, batch._replace(x=loss_inputs["view"]), with_levels=True).select_levels(
                self.config.levels
            )
            levels = tuple(torch.cat(both) for both in zip(levels, other, strict=True))
            if config.positives == "self":
                y, config = torch.arange(len(y), device=y.device), replace(config, positives="label")
            y, mask = y.repeat(2), mask.repeat(2)
        each = [pairs(level, y, mask, config) for level in levels]
        contrast, penalty = (torch.stack(part).mean() for part in zip(*each, strict=True))
        loss = task + self.config.contrast_weight * (contrast + self.config.penalty_weight * penalty)
        return {"loss": loss, "task": task, "contrast": contrast, "penalty": penalty}


def _second_view(now: Step) -> Tensors:
    """Return other views (B, b, C, H, W) of a step's images."""
    return {"view": now.batches.second_view.images(range(now.number, now.number + 1), len(now.stack))}


def _hard(features: Tensor, y: Tensor, mask: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return contrast and penalty in form C of features (b, C_l), averaged over the batch.

    The contrast compares the least similar positive with the most similar negatives. The penalty is log(1 + e^((q - 1) / tau)),
    with q the similarity of that positive, if q reaches lambda. An example without a positive is its own positive, with
    similarity 1.
    """
    similarity, others, same = _pairs(features, y, mask)
    if config.positives == "self":
        same = torch.zeros_like(same)
    none = ~same.any(1)
    hardest = torch.where(none, 1.0, similarity.masked_fill(~same, torch.inf).amin(1).clamp_max(1.0))
    scores = without(similarity / config.temperature, ~others | same)
    nearest = scores.topk(min(config.hard_negatives, scores.shape[1]), dim=1).values + _negative_offset(config)
    contrast = F.softplus(torch.logsumexp(nearest, dim=1) - hardest / config.temperature)
    close = torch.where(none | (hardest < config.threshold), -1.0, hardest)
    penalty = F.softplus((close - 1) / config.temperature + _negative_offset(config))
    return masked_mean(contrast, mask), masked_mean(penalty, mask)


def _all(features: Tensor, y: Tensor, mask: Tensor, config: Config) -> tuple[Tensor, Tensor]:
    """Return contrast and penalty in form P of features (b, C_l), averaged over the batch.

    Contrast: sum_j [logsumexp_(k != i)(s_ik / tau) - s_ij / tau] over the positives j of i. Penalty: sum_j s_ij / tau over the
    positives with s_ij > lambda. An example without a positive adds 0. With positives=self an example is its own positive (s =
    1).
    """
    similarity, others, same = _pairs(features, y, mask)
    scores = similarity / config.temperature
    negative = others if config.positives == "self" else others & ~same
    every = torch.logsumexp(without(scores + _negative_offset(config) * negative.to(scores), ~others), dim=1)
    if config.positives == "self":
        return masked_mean(F.softplus(every - 1 / config.temperature), mask), torch.zeros_like(mask[0])
    count = same.sum(1).to(scores)
    contrast = count * torch.where(count > 0, every, 0.0) - (scores * same).sum(1)
    penalty = (scores * (same & (similarity > config.threshold))).sum(1)
    if config.positive_reduce == "mean":
        contrast, penalty = contrast / count.clamp_min(1), penalty / count.clamp_min(1)
    return masked_mean(contrast, mask), masked_mean(penalty, mask)


def _pairs(features: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return cosines and two masks of pairs, (b, b) each.

    Returns:
        The cosines, a mask of pairs of two different examples, and a mask of those pairs that share their label.
    """
    directions = unit(features)
    others = (mask.unsqueeze(1) * mask.unsqueeze(0) > 0) & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    return directions @ directions.T, others, others & (y.unsqueeze(1) == y.unsqueeze(0))


def _negative_offset(config: Config) -> float:
    """Return log(beta) / tau, which the released code adds to the logits of negatives."""
    return math.log(config.negative_weight) / config.temperature
