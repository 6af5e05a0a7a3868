"""Protect uploads on the client: clip and add noise for ``privacy=local``, or only add noise for ``privacy=laplace``."""

from collections.abc import Sequence

import torch

from contrafed.core.privacy import laplace, local
from contrafed.core.privacy.mechanism import clip_norms, noise
from contrafed.core.tensors import Tensors

UPDATES, PROTOTYPES = ("model/", "delta/"), "proto/mean"
# Tensors that are uploaded unchanged: each client's number of examples per class, which is considered public
# (docs/RELIABILITY.md).
PUBLIC_TENSOR = "proto/count"


def made_private(
    sent: Tensors, received: Tensors, how: local.Config | laplace.Config, seed: int, server_round: int, clients: Sequence[int]
) -> Tensors:
    """Add noise to an upload: to the change of the received tensors, and to prototypes.

    With ``local``, update and prototypes are clipped separately, prototypes over all classes together. The noise has a standard
    deviation of noise_multiplier times the clip. With ``laplace`` nothing is clipped.

    Args:
        sent: The upload (B, ...).
        received: The received tensors (B, ...).
        how: Settings of the noise.
        seed: The run's seed.
        server_round: The round.
        clients: Partition ids of the B clients.

    Returns:
        The upload with noise, in the same shapes.
    """
    updates = {n: v for n, v in sent.items() if n.startswith(UPDATES)}
    base = {n: received[n] for n in updates if n.startswith("model/")}
    changes = {n: v - base[n] if n in base else v for n, v in updates.items()}
    out = dict(sent)
    for n, v in _add_noise(changes, "clip_norm", how, seed, "update noise", server_round, clients).items():
        out[n] = base[n] + v if n in base else v
    tables = {PROTOTYPES: sent[PROTOTYPES]} if PROTOTYPES in sent else {}
    return out | _add_noise(tables, "prototype_clip", how, seed, "prototype noise", server_round, clients)


def _add_noise(
    tensors: Tensors,
    clip: str,
    how: local.Config | laplace.Config,
    seed: int,
    purpose: str,
    server_round: int,
    clients: Sequence[int],
) -> Tensors:
    """Clip and add noise. ``clip`` is the key of the clipping norm."""
    if not tensors:
        return {}
    tensors = {n: v.detach() for n, v in tensors.items()}
    if isinstance(how, laplace.Config):
        scale = (how.variance / 2) ** 0.5
    else:
        limit = getattr(how, clip)
        tensors, scale = clip_norms(tensors, limit), how.noise_multiplier * limit
    rows = [noise({n: v[0] for n, v in tensors.items()}, how, seed, purpose, server_round, client) for client in clients]
    return {n: v + scale * torch.stack([row[n] for row in rows]).to(v.dtype) for n, v in tensors.items()}
