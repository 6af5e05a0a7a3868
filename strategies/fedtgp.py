"""FedTGP's strategy: train global prototypes, apart from each other by an adaptive margin."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contrafed.core.randomness import torch_generator
from contrafed.core.schema import Range
from contrafed.server.base import FederatedStrategy, Replies, Tensors
from contrafed.server.prototypes import collect_prototypes, run_sgd


@dataclass(frozen=True)
class Config:
    """Hyper-parameters of the strategy, each with the paper's symbol."""

    server_lr: Annotated[float, Range(gt=0)]  # of the prototypes' network
    server_epochs: Annotated[int, Range(ge=0)]  # S, passes over the uploaded prototypes
    server_batch: Annotated[int, Range(ge=1)]  # prototypes per step
    max_margin: Annotated[float, Range(ge=0)]  # tau


class FedTGP(FederatedStrategy):
    """Train a small network whose output for each class c is the global prototype P_c (D,).

    For each uploaded prototype z of class y, minimise the cross-entropy of one score for each class. The score of y is
    -(|z - P_y| + margin), that of another class c is -|z - P_c|. The margin is the largest of the classes' distances to their
    nearest class, at most tau. The network is an embedding of D numbers a class, a linear layer with ReLU, and a linear layer,
    all of width D.

    Source: Zhang et al. 2024, and the authors' code for the network, the margin and the optimiser (SGD).

    Deviation: batches are drawn from the run's seed.

    From the first uploads on all classes have a prototype, as in the authors' code. That of a class which no client has
    uploaded is the drawn network's, and moves away from the others.
    """

    @classmethod
    def needs_individual_updates(cls, config: Any) -> str:
        """Return why single updates are needed: the network learns from each client's prototypes."""
        return "trains its prototypes on single clients' prototypes"

    def setup(self) -> None:
        """Draw the network's initial parameters, as torch's layers would have them."""
        classes, width = self.broadcast_spec["proto/mean"]
        draw, bound = torch_generator(self.seed, "global prototypes"), 1 / math.sqrt(width)

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(shape, generator=draw) - 1) * bound

        self.state["network"] = {
            "embedding": torch.randn(classes, width, generator=draw),
            "hidden.weight": uniform(width, width),
            "hidden.bias": uniform(width),
            "out.weight": uniform(width, width),
            "out.bias": uniform(width),
        }
        self.state["valid"] = torch.zeros(classes)

    def broadcast(self, model: Tensors) -> Tensors:
        """Return the prototypes, without any tensor of the model."""
        return {"proto/mean": generate(self.state["network"]).float(), "proto/valid": self.state["valid"]}

    def aggregate(self, model: Tensors, replies: Replies) -> Tensors:
        """Train the network on the prototypes of the classes that clients hold. The unused model stays as it is."""
        if (prototypes := collect_prototypes(replies)) is None:
            return model
        z, y = prototypes
        margin = min(find_margin(z, y), self.config.max_margin)
        draw = torch_generator(self.seed, "global prototypes", self.round.server_round)
        orders = (torch.randperm(len(y), generator=draw).to(y.device) for _ in range(self.config.server_epochs))
        batches = (rows for order in orders for rows in order.split(self.config.server_batch))

        def loss(network: Tensors, z: Tensor, y: Tensor) -> Tensor:
            return contrast(generate(network), z, y, margin)

        network = {name: value.to(z) for name, value in self.state["network"].items()}
        network = run_sgd(network, loss, prototypes, batches, self.config.server_lr)
        self.state["network"] = {name: value.float() for name, value in network.items()}
        self.state["valid"] = torch.ones_like(self.state["valid"])
        return model


def generate(network: Tensors) -> Tensor:
    """Return the prototypes (C, D)."""
    hidden = F.relu(F.linear(network["embedding"], network["hidden.weight"], network["hidden.bias"]))
    return F.linear(hidden, network["out.weight"], network["out.bias"])


def contrast(prototypes: Tensor, z: Tensor, y: Tensor, margin: float) -> Tensor:
    """Compute the mean loss of uploaded prototypes z (n, D) of classes y (n,)."""
    distances = torch.cdist(z, prototypes) + margin * F.one_hot(y, len(prototypes))
    return F.cross_entropy(-distances, y)


def find_margin(z: Tensor, y: Tensor) -> float:
    """Return the largest distance between the mean of a class and the nearest mean of another, infinity for one class."""
    means = torch.stack([z[y == label].mean(0) for label in y.unique()])
    distances = torch.cdist(means, means)
    distances.fill_diagonal_(math.inf)
    return float(distances.amin(1).max())
