"""FedNova: the length of a client's path by hand and by torch, and equality to FedAvg with equal steps."""

import pytest
import torch
from hand import as_fedavg, rule_of
from helpers import make_local_training

from contrafed.server.base import Replies, Reply
from contrafed.strategies.fednova import path_length


def step_of(deltas, sizes, **changes):
    """Return the model's step and the mean number of steps, for clients with so many examples and these updates."""
    rule = rule_of("fednova", sizes, **changes)
    model = {"w": torch.zeros(1, dtype=torch.float64)}
    sent = rule.broadcast(model)
    replies = [Reply(k, {"model/w": torch.tensor([delta])}, sizes[k], {}, sent) for k, delta in enumerate(deltas)]
    return float(rule.aggregate(model, Replies(replies))["w"]), rule.round.metrics["effective_steps"]


SINGLE_EXAMPLE_STEPS = {"epochs": 1, "batch_size": 1}  # as many steps as examples


def test_by_hand():
    """tau = (1, 3), p = 1/2 each: Delta (1, 3) gives 2 (0.5 + 0.5), Delta (1, 1) gives 2 (0.5 + 1/6)."""
    assert step_of([1.0, 3.0], (1, 3), weights="uniform", local=SINGLE_EXAMPLE_STEPS) == (pytest.approx(2, rel=1e-12), 2)
    assert step_of([1.0, 1.0], (1, 3), weights="uniform", local=SINGLE_EXAMPLE_STEPS) == (pytest.approx(4 / 3, rel=1e-6), 2)
    # by examples: p = (1/4, 3/4), tau_eff = 2.5, and 2.5 (1/4 + 1/4)
    assert step_of([1.0, 1.0], (1, 3), weights="samples", local=SINGLE_EXAMPLE_STEPS) == (pytest.approx(1.25, rel=1e-6), 2.5)
    assert step_of([0.0, 0.0], (1, 3), local={"iterations": 0, "epochs": None}) == (0, 0)


def test_a_pull_changes_the_lengths_and_not_the_factor_by_hand():
    # At rate 0.5 and weight 1 three steps go 1 + 0.5 + 0.25 = 1.75. The factor is of the steps, (1 + 3) / 2 = 2.
    step, factor = step_of(
        [1.0, 3.5], (1, 3), weights="uniform", local=SINGLE_EXAMPLE_STEPS | {"lr": 0.5, "proximal_weight": 1.0}
    )
    assert (step, factor) == (pytest.approx(2 * (1 / 1 + 3.5 / 1.75) / 2, rel=1e-6), 2)


def test_the_length_of_a_path_by_hand():
    assert path_length(make_local_training(iterations=7), 1, 40) == 7
    assert path_length(make_local_training(iterations=0), 1, 40) == 0
    rho, tau = 0.9, 6
    printed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert path_length(make_local_training(iterations=tau, momentum=rho), 1, 40) == pytest.approx(printed, rel=1e-12)
    # the paper's for a pull towards W
    pulled = path_length(make_local_training(iterations=tau, lr=0.1, proximal_weight=0.5), 1, 40)
    assert pulled == pytest.approx((1 - 0.95**tau) / 0.05, rel=1e-12)
    # two steps each at 1, 1/2 and 1/4
    decaying = make_local_training(epochs=3, batch_size=20, epoch_lr_decay=0.5, lr_decay=0.7)
    assert path_length(decaying, 9, 40) == pytest.approx(2 * 1.75, rel=1e-12)


def test_the_length_of_a_path_is_how_far_torchs_sgd_goes_on_a_constant_gradient():
    w = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.05, momentum=0.8)
    for _ in range(9):
        w.grad = torch.ones_like(w)
        sgd.step()
    assert path_length(make_local_training(iterations=9, lr=0.05, momentum=0.8), 1, 40) == pytest.approx(
        -w.item() / 0.05, rel=1e-12
    )


@pytest.mark.parametrize(
    ("name", "local", "expected"),
    [
        ("fedprox", {"iterations": 6, "epochs": None, "lr": 0.1}, [6, 6]),  # with a pull the factor is of steps, not of lengths
        ("perfedavg", {"iterations": None, "epochs": 1, "batch_size": 10}, [1, 3]),  # in batches of twice the size
    ],
)
def test_a_method_names_the_settings_that_it_trains_by(name, local, expected):
    rule = rule_of(name, (20, 60), server="fednova", local=local, **({"proximal_weight": 0.5} if name == "fedprox" else {}))
    model = {"w": torch.zeros(1, dtype=torch.float64)}
    sent = rule.broadcast(model)
    rule.aggregate(model, Replies([Reply(k, {"model/w": torch.zeros(1)}, n, {}, sent) for k, n in enumerate((20, 60))]))
    assert rule.round.metrics["effective_steps"] == pytest.approx((expected[0] + 3 * expected[1]) / 4, rel=1e-12)


def test_with_unequal_steps_it_is_not():
    ours, fedavg = as_fedavg("fednova")
    assert max((ours[-1][n] - fedavg[-1][n]).abs().max() for n in ours[-1]) > 1e-4
