"""What a node does to what it sends where ``privacy=local``, clip and add noise, or ``privacy=laplace``, add noise."""

from collections.abc import Sequence

import torch

from contrafed.core.privacy import laplace, local
from contrafed.core.privacy.mechanism import clipped, noise
from contrafed.core.tensors import Tensors

UPDATES, PROTOTYPES = ("model/", "delta/"), "proto/mean"
# What is sent beside them as it is: how many examples of which class a node holds, taken as known (docs/RELIABILITY.md).
PUBLIC = "proto/count"


def made_private(
    sent: Tensors, received: Tensors, how: local.Config | laplace.Config, seed: int, server_round: int, nodes: Sequence[int]
) -> Tensors:
    """Return what nodes send (B, ...) with noise: the change of what they received, and their prototypes.

    ``local``: update and prototypes are clipped each by itself, prototypes over all classes together, and noise with a standard
    deviation of noise_multiplier times the clip is added to every number. ``laplace``: nothing is clipped.
    """
    updates = {n: v for n, v in sent.items() if n.startswith(UPDATES)}
    base = {n: received[n] for n in updates if n.startswith("model/")}
    changes = {n: v - base[n] if n in base else v for n, v in updates.items()}
    out = dict(sent)
    for n, v in _noised(changes, "clip_norm", how, seed, "update noise", server_round, nodes).items():
        out[n] = base[n] + v if n in base else v
    tables = {PROTOTYPES: sent[PROTOTYPES]} if PROTOTYPES in sent else {}
    return out | _noised(tables, "prototype_clip", how, seed, "prototype noise", server_round, nodes)


def _noised(
    tensors: Tensors,
    clip: str,
    how: local.Config | laplace.Config,
    seed: int,
    purpose: str,
    server_round: int,
    nodes: Sequence[int],
) -> Tensors:
    """``clip``: the key that says to which norm."""
    if not tensors:
        return {}
    tensors = {n: v.detach() for n, v in tensors.items()}
    if isinstance(how, laplace.Config):
        scale = (how.variance / 2) ** 0.5
    else:
        limit = getattr(how, clip)
        tensors, scale = clipped(tensors, limit), how.noise_multiplier * limit
    rows = [noise({n: v[0] for n, v in tensors.items()}, how, seed, purpose, server_round, node) for node in nodes]
    return {n: v + scale * torch.stack([row[n] for row in rows]).to(v.dtype) for n, v in tensors.items()}
