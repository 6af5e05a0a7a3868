"""FedDyn: the golden problem by its algorithm in numbers, the sum of all gradients, fixed points."""

import pytest
import torch
from hand import client_of, losses_of, whole
from helpers import FULL_COHORTS, close, run_scalar

PLAIN_TRAINING = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None}


def test_the_loss_by_hand():
    """w = (3, 1), W = (1, 0), g = (1/2, 1/2): the task is (3 - 1)^2 / 2 = 2, <g, w> is 2, and the quadratic term 0.05 * 5."""
    client = client_of("feddyn", proximal_weight=0.1)
    losses, w = losses_of(client, [3.0, 1.0], **{"gradient/classifier.w": [0.5, 0.5], "global/classifier.w": [1.0, 0.0]})
    assert losses["loss"].item() == pytest.approx(2 - 2 + 0.05 * 5, rel=1e-12)
    assert torch.autograd.grad(losses["loss"], w)[0].tolist() == pytest.approx([2 - 0.5 + 0.2, -0.5 + 0.1], rel=1e-12)


def test_equal_clients_go_to_the_common_minimum_and_stay():
    assert run_scalar("feddyn", [[0, 1, 2]] * 80, targets=(4, 4, 4), proximal_weight=1.0, local=PLAIN_TRAINING)[
        -1
    ] == pytest.approx(4)
    assert run_scalar("feddyn", FULL_COHORTS, start=4.0, targets=(4, 4, 4), local=PLAIN_TRAINING) == [4.0] * 5


@pytest.mark.slow
def test_unequal_clients_that_solve_their_objective_go_to_the_global_minimum():
    """Also with absent clients, for which FedAvg would move to the minimum of the last participants."""
    pairs = [[0, 1], [1, 2], [0, 2]] * 40
    values = run_scalar("feddyn", pairs, proximal_weight=1.0, local=PLAIN_TRAINING | {"iterations": 100})
    assert values[-1] == pytest.approx(3, abs=1e-6)


def test_its_first_round_is_fedproxs_step_twice_over():
    """g = 0: w_k are FedProx's with mu = alpha, and W = mean w_k + mean Delta."""
    steps = {"proximal_weight": 0.1, "local": PLAIN_TRAINING}
    start, first = whole("feddyn", [[]], **steps)[0], whole("feddyn", [range(8)], **steps)[0]
    prox = whole("fedprox", [range(8)], weights="uniform", **steps)[0]
    close(first, {n: 2 * prox[n] - start[n] for n in prox}, 1e-9)


def test_h_is_the_mean_of_all_clients_gradients_whoever_was_there():
    _, memory, strategy = whole("feddyn", local=PLAIN_TRAINING)
    for name, h in strategy.state["gradient"].items():
        total = sum(value for key, value in memory.items() if key.endswith(f"/gradient/{name}"))
        torch.testing.assert_close(h, total / 8, rtol=1e-9, atol=1e-12)
        assert h.abs().max() > 0
