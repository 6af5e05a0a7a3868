"""The losses that methods share: contrast by hand, cosines of zero vectors, padding."""

import math

import pytest
import torch

from contrafed.training.losses import contrast, cosine, cross_entropy


def test_contrast_by_hand():
    """P5: cos(z,Z) = 1, history {0.9, 0.2}, mu = 0.5, T = 0.5: pos = e^2 + e^1.8, neg = e^0.4."""
    scores = torch.tensor([[1.0, 0.9, 0.2]], dtype=torch.float64) / 0.5
    far = torch.tensor([[False, False, True]])
    assert contrast(scores, far).item() == pytest.approx(0.105269, abs=5e-7)
    history = torch.tensor([[False, True, True]])
    assert contrast(scores, history).item() == pytest.approx(0.703408, abs=5e-7)
    assert contrast(scores, far, torch.tensor([False, True, False])).item() == pytest.approx(
        math.log1p(math.exp(0.4 - 2)), abs=5e-7
    )
    # A negative that does not exist counts as little as a positive that does not.
    assert contrast(scores, history, torch.tensor([False, True, True])).item() == 0


def test_contrast_without_negatives_is_exactly_zero_with_zero_gradient():
    scores = torch.tensor([[2.0, 1.8]], requires_grad=True)
    loss = contrast(scores, torch.zeros(1, 2, dtype=torch.bool))
    loss.sum().backward()
    assert loss.item() == 0.0
    assert scores.grad.abs().max().item() == 0.0


def test_cosine_of_a_zero_vector_is_zero_with_a_finite_gradient():
    a = torch.zeros(1, 3, requires_grad=True)
    value = cosine(a, torch.ones(1, 3))
    value.sum().backward()
    assert value.item() == 0.0
    assert torch.isfinite(a.grad).all()


def test_padding_never_touches_a_loss():
    logits, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 3])
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
    expected = torch.nn.functional.cross_entropy(logits[:2], y[:2])
    torch.testing.assert_close(cross_entropy(logits, y, mask), expected)
    logits[2:] = 1e4 * torch.randn(2, 5)
    torch.testing.assert_close(cross_entropy(logits, y, mask), expected)
