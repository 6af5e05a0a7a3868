"""Keep the table of global prototypes, and train on the clients' prototypes, for the strategies that do."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from contrafed.core.tensors import Tensors
from contrafed.server.replies import Replies

Weighting = Literal["class_count", "plain", "data"]


def collect_prototypes(replies: Replies) -> tuple[Tensor, Tensor] | None:
    """Return the prototypes of all replies (n, D), float64, and their classes (n,), by reply and class. None without any."""
    pairs = [(reply.tensors["proto/mean"].double(), reply.tensors["proto/count"] > 0) for reply in replies]
    if not any(bool(held.any()) for _, held in pairs):
        return None
    return torch.cat([means[held] for means, held in pairs]), torch.cat([held.nonzero().flatten() for _, held in pairs])


def run_sgd(
    params: Tensors,
    loss: Callable[[Tensors, Tensor, Tensor], Tensor],
    prototypes: tuple[Tensor, Tensor],
    batches: Iterable[Tensor],
    lr: float,
) -> Tensors:
    """Return the parameters after SGD on ``loss(params, z, y)``, one step for each batch.

    Args:
        params: The parameters at the start, float64.
        loss: The mean loss of prototypes z (b, D) of classes y (b,).
        prototypes: All z (n, D) and y (n,).
        batches: The rows of each batch (b,), int64.
        lr: Learning rate.
    """
    z, y = prototypes
    for rows in batches:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        gradients = torch.autograd.grad(loss(leaves, z[rows], y[rows]), list(leaves.values()))
        params = {name: leaf.detach() - lr * slope for (name, leaf), slope in zip(leaves.items(), gradients, strict=True)}
    return params


class Prototypes:
    """Class means (C, D), and which classes any client has had so far (C,). A strategy has one and calls its two methods."""

    def __init__(self, state: dict[str, Any], broadcast_spec: Mapping[str, tuple[int, ...]]) -> None:
        """Start empty, in the shapes that clients receive (``broadcast_spec``). The tensors are in the strategy's ``state``."""
        self.state = state
        state["means"] = torch.zeros(broadcast_spec["proto/mean"])
        state["valid"] = torch.zeros(broadcast_spec["proto/valid"])

    def broadcast(self) -> Tensors:
        """Return the part of the broadcast that holds the table."""
        return {"proto/mean": self.state["means"], "proto/valid": self.state["valid"]}

    def merge(self, replies: Replies, weighting: Weighting) -> None:
        """Replace the prototype of every class in the replies by the mean over its holders, summed in float64.

        An aggregation other than the mean combines the uploads of each class's holders. A class without holders keeps its last
        prototype. With ``class_count`` holders are weighted by their examples of the class, which is the pooled mean (FedCRL
        Equation 6). With ``plain`` they are weighted equally (MpFedcon Equation 4), and with ``data`` by their examples of all
        classes.
        """
        counts = torch.stack([reply.tensors["proto/count"] for reply in replies]).double()  # (m, C)
        examples = torch.from_numpy(replies.num_examples).to(counts).unsqueeze(1)
        counts = counts.clamp_min(0).minimum(examples)  # a client cannot have more examples of a class than in total
        held = counts > 0
        weights = {
            "class_count": counts,
            "plain": held.double(),
            "data": held * examples,
        }[weighting]
        present = held.any(0)
        pooled, old = replies.class_means(weights), self.state["means"]
        self.state["means"] = torch.where(present.unsqueeze(1), pooled, old.to(pooled)).to(old.dtype)
        self.state["valid"] = torch.maximum(self.state["valid"], present.to(self.state["valid"]))
