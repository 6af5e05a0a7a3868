"""FedNTD: its distillation by hand, nothing from the true logit, and FedAvg without it."""

import pytest
import torch
from hand import class_losses

from contrafed.core.split_model import Features


def losses(logits, teacher, y=0, **changes):
    teacher = torch.tensor([teacher], dtype=torch.float64)
    return class_losses("fedntd", logits, y, changes, teacher=Features(teacher, teacher, ()))


def distil(*args, **changes):
    return losses(*args, **changes)[0]["distil"].item()


def test_by_hand():
    """Of (5, 1, 0) and (2, 0, 1) with label 0 there remain (1, 0) and (0, 1): KL = (e - 1) / (e + 1)."""
    assert distil([5.0, 1.0, 0.0], [2.0, 0.0, 1.0]) == pytest.approx(0.462117, abs=1e-6)
    assert distil([5.0, 1.0, 0.0], [2.0, 0.0, 1.0], temperature=2.0) == pytest.approx(4 * 0.122459, abs=4e-6)


def test_the_true_logit_says_nothing_and_gets_no_gradient():
    at = distil([5.0, 1.0, 0.0], [2.0, 0.0, 1.0])
    assert distil([-8.0, 1.0, 0.0], [2.0, 0.0, 1.0]) == pytest.approx(at, rel=1e-12)
    assert distil([5.0, 1.0, 0.0], [90.0, 0.0, 1.0]) == pytest.approx(at, rel=1e-12)
    found, leaf = losses([5.0, 1.0, 0.0], [2.0, 0.0, 1.0])
    (gradient,) = torch.autograd.grad(found["distil"], leaf)
    assert gradient[0] == 0
    assert gradient[1].item() == pytest.approx(0.462117, abs=1e-6)  # of class 1: 0.731059 - 0.268941


def test_equal_logits_and_two_classes_give_nothing():
    assert distil([0.4, 1.0, -3.0], [0.4, 1.0, -3.0], y=2) == 0
    assert distil([0.4, 1.0], [7.0, -2.0], y=1, temperature=0.01) == 0


def test_the_sum_of_its_parts():
    found, _ = losses([5.0, 1.0, 0.0], [2.0, 0.0, 1.0], task_weight=0.7, distil_weight=0.3)
    assert found["loss"].item() == pytest.approx(0.7 * found["task"].item() + 0.3 * found["distil"].item(), rel=1e-12)
