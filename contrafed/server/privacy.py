"""Apply central privacy on the server: a strategy receives sums of clipped replies with noise, and no individual reply.

The noise hides whether a client uploaded its update or zeros. The cohort, the clients' class counts and the weights are
considered public (docs/RELIABILITY.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core.errors import UserError
from contrafed.core.privacy.central import Config
from contrafed.core.privacy.mechanism import clip_norms, noise
from contrafed.core.tensors import Tensors
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.replies import Replies, Reply
from contrafed.training.privacy import PROTOTYPES, PUBLIC_TENSOR, UPDATES

__all__ = ["Hidden", "PrivateReplies", "aggregate_privately", "count_protected_kinds"]


@dataclass
class Hidden(Reply):
    """A reply that shows a strategy only what is public about the client."""

    def get_tensors(self, name: str) -> Tensors:
        """Raise ``UserError``, because central privacy excludes strategies that read individual replies."""
        raise UserError(f"privacy=central: the server rule reads {name} of client {self.client}, but sums alone have noise")


class PrivateReplies(Replies):
    """Replies that return weighted sums of clipped uploads with noise, each kind once a round.

    The noise has a standard deviation of noise_multiplier times the clip times the largest weight. For prototypes it is set by
    class.
    """

    def __init__(self, replies: Sequence[Reply], config: Config, seed: int, server_round: int) -> None:
        super().__init__([Hidden(r.client, _public(r), r.num_examples, r.metrics, r.received) for r in replies])
        self.config, self._seed, self._round = config, seed, server_round
        self._deltas = [_clip_norm(reply.get_tensors("delta"), config.clip_norm) for reply in replies]
        tables = [reply.tensors[PROTOTYPES] for reply in replies if PROTOTYPES in reply.tensors]
        self._prototypes = [_clip_norm({PROTOTYPES: table}, config.prototype_clip)[PROTOTYPES] for table in tables]
        self._told: set[str] = set()

    def get_tensors(self, name: str) -> list[Tensors]:
        """Raise ``UserError``, as an individual reply does."""
        return [reply.get_tensors(name) for reply in self]

    def weighted_sum(self, group: str, weights: np.ndarray) -> Tensors:
        """Return the weighted sum of the clipped updates with noise, in float64. For models, the received models are added."""
        if group not in ("model", "delta"):
            raise UserError(f"privacy=central: the server rule sums {group}, which is not clipped")
        self._once("updates")
        total = weighted_sum(self._deltas, weights.tolist())
        scale = self.config.noise_multiplier * self.config.clip_norm * float(np.abs(weights).max())
        for name, value in noise(total, self.config, self._seed, "update noise", self._round).items():
            total[name] += scale * value
        if group == "delta":
            return total
        base = weighted_sum([reply.start_model(total) for reply in self], weights.tolist())
        return {name: value + base[name] for name, value in total.items()}

    def weighted_terms(self, group: str, weights: np.ndarray) -> tuple[list[Tensors], list[float]]:
        """Return the sum itself as one term."""
        return ([self.weighted_sum(group, weights)], [1.0]) if len(self) else ([], [])

    def class_means(self, weights: Tensor) -> Tensor:
        """Return the weighted mean of the clipped prototypes by class (C, D), with noise, float64."""
        self._once("prototypes")
        shares = weights / weights.sum(0).clamp_min(1e-300)  # (m, C)
        pooled = torch.einsum("mc,mcd->cd", shares, torch.stack(self._prototypes).double())
        drawn = noise({PROTOTYPES: pooled}, self.config, self._seed, "prototype noise", self._round)[PROTOTYPES]
        scale = self.config.noise_multiplier * self.config.prototype_clip * shares.amax(0)
        return pooled + scale.unsqueeze(1) * drawn

    def _once(self, kind: str) -> None:
        """Raise ``UserError`` for a second sum of one kind, because two sums with the same noise would reveal their
        difference.
        """
        if kind in self._told:
            raise UserError(f"privacy=central: the server rule takes two sums of the {kind} of one round, but one has noise")
        self._told.add(kind)


def aggregate_privately(rule: Any, model: Tensors, replies: Replies) -> Tensors:
    """Return the aggregate of hidden replies.

    If epsilon depends on sampling, a round without replies gets noise too, so that an empty cohort stays hidden.
    """
    config, server_round = rule.privacy, rule.round.server_round
    new: Tensors = rule.next_model(model, PrivateReplies(replies, config, rule.seed, server_round))
    if not config.amplification or len(replies):
        return new
    scale = config.noise_multiplier * config.clip_norm * rule.fixed_weight()
    like = {name: model[name] for name in rule.shared_names}
    drawn = noise(like, config, rule.seed, "update noise", server_round)
    return new | {name: model[name].double() + scale * value for name, value in drawn.items()}


def count_protected_kinds(upload_spec: Sequence[str], broadcast_spec: Sequence[str], strategy: str) -> int:
    """Return how many kinds of a client's uploaded tensors the noise covers: updates and prototypes.

    Raises:
        UserError: If it uploads other kinds, or none.
    """
    others = {
        name.partition("/")[0]
        for name in upload_spec
        if not name.startswith(UPDATES) and name not in (PROTOTYPES, PUBLIC_TENSOR)
    }
    if others:
        raise UserError(
            f"privacy: strategy={strategy} also sends {', '.join(sorted(others))}, which are neither an update nor prototypes "
            "and have no clip"
        )
    if lost := {name for name in upload_spec if name.startswith("model/")} - set(broadcast_spec):
        raise UserError(f"privacy: strategy={strategy} sends {min(lost)}, which it does not receive: its change is not known")
    kinds = {PROTOTYPES if name == PROTOTYPES else "update" for name in upload_spec if name != PUBLIC_TENSOR}
    if not kinds:
        raise UserError(f"privacy: strategy={strategy} sends nothing that could be protected")
    return len(kinds)


def _public(reply: Reply) -> Tensors:
    return {PUBLIC_TENSOR: reply.tensors[PUBLIC_TENSOR]} if PUBLIC_TENSOR in reply.tensors else {}


def _clip_norm(tensors: Tensors, limit: float) -> Tensors:
    """Return one client's tensors, clipped."""
    if not tensors:
        return tensors
    return {n: v[0] for n, v in clip_norms({n: v.unsqueeze(0) for n, v in tensors.items()}, limit).items()}
