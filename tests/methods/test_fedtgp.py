"""FedTGP: margin, loss and a step by hand, and prototypes that stay without epochs."""

import math

import pytest
import torch
from helpers import close, digits_run

from contrafed.strategies.fedtgp import contrast, find_margin, generate

ROUNDS = [[0, 1, 2, 3], [1, 2, 5], []]


def test_the_margin_is_the_largest_distance_to_the_nearest_other_class():
    """Means (0, 0), (3, 0), (3, 4): distances to the nearest are 3, 3 and 4."""
    z = torch.tensor([[0.0, 1.0], [0.0, -1.0], [3.0, 0.0], [3.0, 4.0]])
    assert find_margin(z, torch.tensor([0, 0, 1, 2])) == 4
    assert find_margin(z[:2], torch.tensor([0, 0])) == math.inf


def test_the_loss_by_hand():
    """Distances 1 and 2 of a z of class 0, margin 0.5: ln(1 + e^(1.5 - 2))."""
    prototypes = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    loss = contrast(prototypes, torch.zeros(1, 2), torch.tensor([0]), 0.5)
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-0.5)), rel=1e-6)


def test_training_separates_the_prototypes_and_stacked_equals_alone():
    quick = {"schedule": ROUNDS, "num_rounds": 3, "local": {"epochs": 1}}
    (_, still), (_, alone) = (digits_run("fedtgp", **quick, server_epochs=epochs) for epochs in (0, 20))
    assert torch.equal(still.broadcast({})["proto/mean"], generate(still.state["network"]))
    assert not torch.equal(still.state["network"]["embedding"], alone.state["network"]["embedding"])
    _, stacked = digits_run("fedtgp", **quick, server_epochs=20, stack_size=4)
    close(alone.state["network"], stacked.state["network"], 1e-6)
    assert bool(alone.state["valid"].all())
