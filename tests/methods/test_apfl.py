"""APFL: the golden problem, a step and alpha by hand, FedAvg's W bit for bit, and alpha at 0 and 1."""

import pytest
from helpers import FULL_COHORTS, PATTERN, same
from left import build_broadcast, digits_left, scalar_client, scalar_left

FIXED_ALPHA = {"alpha": 0.75, "adaptive": False}


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("changes", "rounds", "own", "alpha"),
    [
        (FIXED_ALPHA, FULL_COHORTS[:3], [1.209788, 3.527208, 2.368498], [0.75] * 3),
        ({}, FULL_COHORTS[:3], [1.372511, 3.185200, 2.247258], [0.718513, 0.716809, 0.479740]),
        ({}, PATTERN, [1.543904, 3.140803, 2.100379], [0.761188, 0.612358, 0.413190]),
    ],
)
def test_golden_values(changes, rounds, own, alpha, stack_size):
    run = scalar_left("apfl", rounds, stack_size=stack_size, **changes)
    assert run.w == scalar_left("fedavg", rounds).w
    assert run.list_state_numbers("own/classifier.w") == pytest.approx(own, abs=1e-5)
    assert run.list_state_numbers("alpha") == pytest.approx(alpha, abs=1e-5)
    mixed = [
        a * v + (1 - a) * run.w[-1]
        for a, v in zip(run.list_state_numbers("alpha"), run.list_state_numbers("own/classifier.w"), strict=True)
    ]
    assert [run.evaluate_client(client) for client in range(3)] == pytest.approx(mixed, abs=1e-12)


def test_alpha_moves_once_a_round_and_stays_in_its_range():
    def train_alpha(target, iterations):
        (update,) = scalar_client("apfl", target, start=2.0, local={"iterations": iterations}).update(
            [build_broadcast(model=0.0)], 1
        )
        return float(update.client_state["alpha"])

    assert train_alpha(3, 5) == train_alpha(3, 1) == pytest.approx(0.9)
    assert (train_alpha(100, 1), train_alpha(-0, 1)) == (1.0, pytest.approx(0.3))


def test_with_all_of_its_own_v_trains_alone_and_with_nothing_it_stays():
    run, alone = digits_left("apfl", alpha=1.0, adaptive=False), digits_left("local")
    still = digits_left("apfl", alpha=0.0, adaptive=False)
    for client in alone.client_state:
        assert same(run.own(client), alone.own(client, "personal"))
        assert same(still.own(client), still.models[0])
