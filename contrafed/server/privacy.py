"""Apply central privacy on the server: a strategy receives sums of clipped replies with noise, and no individual reply.

The noise hides whether a client uploaded its update or zeros. A client without an accepted reply counts as zeros. So weights
and noise do not depend on who answered. The cohort, the clients' class counts and the weights are considered public
(docs/RELIABILITY.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contrafed.core.errors import UserError
from contrafed.core.privacy.central import Config
from contrafed.core.privacy.mechanism import clip_norms, noise
from contrafed.core.tensors import Tensors
from contrafed.core.weighted_sum import weighted_sum
from contrafed.server.norm_limit import DEFAULT_RATIO
from contrafed.server.replies import Replies, Reply
from contrafed.training.privacy import PROTOTYPES, PUBLIC_TENSOR, UPDATES

__all__ = ["Hidden", "PrivateReplies", "aggregate_privately", "check_rejections", "count_protected_kinds"]


@dataclass
class Hidden(Reply):
    """A reply that shows a strategy only what is public about the client."""

    def get_tensors(self, name: str) -> Tensors:
        """Raise ``UserError``, because central privacy excludes strategies that read individual replies."""
        raise UserError(f"privacy=central: the strategy reads {name} of client {self.client}, but sums alone have noise")


class PrivateReplies(Replies):
    """Replies that return weighted sums of clipped uploads with noise, each kind once a round.

    The noise has a standard deviation of noise_multiplier times the clip times the largest weight. For prototypes it is set by
    class.
    """

    def __init__(self, replies: Sequence[Reply], config: Config, seed: int, server_round: int) -> None:
        super().__init__([Hidden(r.client, _public(r), r.num_examples, {}, r.received) for r in replies])
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
            raise UserError(f"privacy=central: the strategy sums {group}, which is not clipped")
        self._once("updates")
        self.note_weights(weights)
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
            raise UserError(f"privacy=central: the strategy takes two sums of the {kind} of one round, but one has noise")
        self._told.add(kind)


def aggregate_privately(strategy: Any, model: Tensors, replies: Replies) -> Tensors:
    """Return the aggregate of hidden replies of the whole cohort.

    If epsilon depends on sampling, a round without a cohort gets noise too, so that an empty cohort stays hidden.
    """
    config, server_round = strategy.privacy, strategy.round.server_round
    cohort = complete_cohort(strategy, replies)
    hidden = PrivateReplies(cohort, config, strategy.seed, server_round)
    new: Tensors = strategy.next_model(model, hidden)
    replies.largest_share = hidden.largest_share
    if not config.amplification or cohort:
        return new
    scale = config.noise_multiplier * config.clip_norm * strategy.fixed_weight()
    like = {name: model[name] for name in strategy.shared_names}
    drawn = noise(like, config, strategy.seed, "update noise", server_round)
    return new | {name: model[name].double() + scale * value for name, value in drawn.items()}


def complete_cohort(strategy: Any, replies: Replies) -> list[Reply]:
    """Return a reply of every client of the round's cohort: zeros where a reply was rejected, failed, was late or was lost.

    Class counts are those that the server knows from before the first round, so that no reply changes a weight.
    """
    device, population, accepted = (
        next(iter(strategy.model.values())).device,
        strategy.population,
        {r.client: r for r in replies},
    )
    kinds = {n: n.replace("model/", "delta/", 1) if n.startswith("model/") else n for n in strategy.upload_spec}
    zeros = {kinds[name]: torch.zeros(shape, device=device) for name, shape in strategy.upload_spec.items()}
    cohort = []
    for client in strategy.round.participants.tolist():
        reply = accepted.get(client)
        if reply is None:
            reply = Reply(client, zeros, int(population.sizes[client]), {}, strategy.received[client])
        if PUBLIC_TENSOR in strategy.upload_spec:
            counts = torch.as_tensor(population.class_counts[client], dtype=torch.float32, device=device)
            reply = replace(reply, tensors=reply.tensors | {PUBLIC_TENSOR: counts})
        cohort.append(reply)
    return cohort


def check_rejections(max_norm: float | None, max_norm_ratio: float | None, min_replies: int, on_divergence: str) -> None:
    """Raise ``UserError`` for settings by which a rejected reply would reveal itself under central privacy."""
    reason = "privacy=central clips every upload, and a rejected reply would reveal itself"
    if max_norm is not None:
        raise UserError(f"engine.max_norm={max_norm:g}: {reason}. Fix: engine.max_norm=null, privacy.clip_norm bounds uploads")
    if max_norm_ratio not in (None, DEFAULT_RATIO):
        raise UserError(f"engine.max_norm_ratio={max_norm_ratio:g}: {reason}. Fix: engine.max_norm_ratio=null")
    if min_replies:
        raise UserError(f"min_replies={min_replies}: with privacy=central it would reveal who answered. Fix: min_replies=0")
    if on_divergence == "stop":
        raise UserError(
            "on_divergence=stop: with privacy=central the end of a run would reveal one client's reply. "
            "Fix: on_divergence=reject"
        )


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
        raise UserError(f"privacy: strategy={strategy} sends nothing. Fix: strategy=fedavg, or privacy=none")
    return len(kinds)


def _public(reply: Reply) -> Tensors:
    return {PUBLIC_TENSOR: reply.tensors[PUBLIC_TENSOR]} if PUBLIC_TENSOR in reply.tensors else {}


def _clip_norm(tensors: Tensors, limit: float) -> Tensors:
    """Return one client's tensors, clipped."""
    if not tensors:
        return tensors
    return {n: v[0] for n, v in clip_norms({n: v.unsqueeze(0) for n, v in tensors.items()}, limit).items()}
