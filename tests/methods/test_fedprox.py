"""FedProx: its step by hand, the golden run, and FedAvg without a pull."""

import pytest
import torch
from hand import client_of
from helpers import close, digits_run, run_scalar, same
from step import loss_of


def test_step_by_hand():
    """w = 3, W = 1, g = 0.5, mu = 0.1, eta = 0.1: 3 - 0.1 (0.5 + 0.1 * 2) = 2.93."""
    losses, w = loss_of(client_of("fedprox", proximal_weight=0.1), [3.0, 1.0], [1.0, 1.0], {})
    (gradient,) = torch.autograd.grad(losses["loss"] - losses["task"], w)
    assert (3 - 0.1 * (0.5 + gradient[0, 0])).item() == pytest.approx(2.93)


def test_first_step_is_fedavgs_for_any_weight():
    one_step = {"local": {"iterations": 1}}
    fedavg, _ = digits_run("fedavg", 1, **one_step)
    fedprox, _ = digits_run("fedprox", 1, proximal_weight=100.0, **one_step)
    close(fedavg[-1], fedprox[-1])


def test_a_strong_pull_keeps_a_model_where_it_was():
    """eta mu = 0.95: w ends near W = 2, though its own optimum is 6."""
    (free,) = run_scalar("fedprox", [[1]], proximal_weight=0.0, local={"iterations": 50})
    (held,) = run_scalar("fedprox", [[1]], proximal_weight=9.5, local={"iterations": 50})
    assert free == pytest.approx(6, abs=0.03)
    assert held == pytest.approx(2 + 4 / 10.5, rel=1e-9)  # where (w - 6) + 9.5 (w - 2) = 0


@pytest.mark.parametrize("stack_size", [1, 4])
def test_its_weight_means_what_every_methods_own_pull_means(stack_size):
    """mu/2 |w - W|^2 is equal in FedProx's loss and as local.proximal_weight with any loss."""
    own, _ = digits_run("fedprox", 2, clients=40, schedule=[range(4)] * 2, stack_size=stack_size, proximal_weight=0.7)
    pulled, _ = digits_run(
        "fedavg", 2, clients=40, schedule=[range(4)] * 2, stack_size=stack_size, local={"proximal_weight": 0.7}
    )
    close(own[-1], pulled[-1], 1e-12)
    free, _ = digits_run("fedavg", 2, clients=40, schedule=[range(4)] * 2, stack_size=stack_size)
    assert not same(free[-1], pulled[-1])
