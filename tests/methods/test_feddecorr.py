"""FedDecorr: its penalty by hand and where it is 0, and FedAvg without it."""

import pytest
import torch
from hand import GOLDEN
from helpers import FULL_COHORTS, PATTERN, run_scalar

from contrafed.training.losses import decorrelation


def penalty(columns, mask=None):
    z = torch.tensor(columns, dtype=torch.float64).T.requires_grad_()
    mask = torch.ones(len(z), dtype=torch.float64) if mask is None else torch.tensor(mask, dtype=torch.float64)
    value = decorrelation(z, mask)
    return value.item(), torch.autograd.grad(value, z)[0]


def test_by_hand():
    """Two identical columns of four give (X^T X)_12 = 3 and R = 9 / 4. Orthogonal centred columns give 0."""
    assert penalty([[1, 2, 3, 4], [1, 2, 3, 4]])[0] == pytest.approx(2.25, rel=1e-7)
    assert penalty([[1, 2, 3, 4], [-1, -2, -3, -4]])[0] == pytest.approx(2.25, rel=1e-7)
    assert penalty([[1, 1, -1, -1], [1, -1, 1, -1]])[0] == pytest.approx(0, abs=1e-15)
    # A third column that is orthogonal to both: two of six products are 3.
    assert penalty([[1, 1, -1, -1], [1, 1, -1, -1], [1, -1, 1, -1]])[0] == pytest.approx(2.25 / 3, rel=1e-7)


def test_units_do_not_matter():
    columns = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).tolist()
    rescaled = [[5 * x - 2 for x in columns[0]], [-0.5 * x + 1 for x in columns[1]], columns[2]]
    assert penalty(rescaled)[0] == pytest.approx(penalty(columns)[0], rel=1e-6)


def test_one_example_is_exactly_0_with_no_gradient():
    for mask in ([1], [1, 0], [0, 0]):
        value, gradient = penalty([[0.3] * len(mask), [-2.0] * len(mask)], mask)
        assert value == 0
        assert gradient.abs().max() == 0


def test_padding_changes_nothing():
    value, gradient = penalty([[1, 2, 3, 5], [1, 0, 3, 2]])
    padded, more = penalty([[1, 2, 3, 5, 99], [1, 0, 3, 2, -7]], [1, 1, 1, 1, 0])
    assert padded == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(more[:4], gradient, rtol=1e-12, atol=1e-12)
    assert more[4].abs().max() == 0


def test_a_dimension_that_never_varies_has_a_finite_gradient():
    value, gradient = penalty([[0, 0, 0], [1, 2, 3]])
    assert value == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("stack_size", [1, 3])
def test_batches_of_one_are_fedavgs_golden_run(stack_size):
    for schedule, golden in zip((FULL_COHORTS, PATTERN), GOLDEN["fedavg"][1:], strict=True):
        found = run_scalar("feddecorr", schedule, stack_size=stack_size, local={"momentum": 0.0, "weight_decay": 0.0})
        assert found == pytest.approx(golden, abs=1e-5)
