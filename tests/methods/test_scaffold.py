"""SCAFFOLD: the golden problem, a round and the correction by hand, the value of c, and cases without an effect."""

import pytest
import torch
from helpers import FULL_COHORTS, PATTERN, close
from left import ABSENCES, build_broadcast, digits_left, scalar_client, scalar_left

PLAIN_VALUES = [2.190000, 2.343900, 2.468559, 2.569533, 2.651322]


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("server_lr", "full", "pattern"),
    [
        (1.0, PLAIN_VALUES, [2.190000, 2.312233, 2.457338, 2.457338, 2.558995]),
        (0.5, [2.095, 2.180975, 2.258782], [2.095, 2.165142, 2.254526, 2.254526, 2.325381]),
    ],
)
def test_golden_values(server_lr, full, pattern, stack_size):
    for rounds, wanted in ((FULL_COHORTS, full), (PATTERN, pattern)):
        found = scalar_left("scaffold", rounds, stack_size=stack_size, server_lr=server_lr).w
        assert found[: len(wanted)] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("local", "change", "control"),
    [
        ({"iterations": 1}, 0.1, -1.0),  # one step: c_k is the gradient at W
        ({"iterations": 2}, 0.19, -0.95),
        ({"iterations": None, "epochs": 2, "epoch_lr_decay": 0.5}, 0.145, -0.145 / 0.15),  # the sum of the rates
        ({"iterations": 0}, 0.0, 0.0),
    ],
)
def test_a_clients_round_by_hand(local, change, control):
    """f = (w - 1)^2 / 2, W = 0, eta = 0.1."""
    client = scalar_client("scaffold", 1, local=local)
    (update,) = client.update([build_broadcast(model=0.0, control=0.0)], 1)
    assert float(update.tensors["delta/classifier.w"]) == pytest.approx(change, abs=1e-12)
    assert float(update.tensors["control_delta/classifier.w"]) == pytest.approx(control, abs=1e-12)
    assert float(update.client_state["client_control/classifier.w"]) == pytest.approx(control, abs=1e-12)


def test_the_correction_by_hand():
    """c = 0.5, c_k = -0.2, a step from W = 0: w = 0.1 (1 - 0.7); c_k' = -0.2 + (-0.5 - 0.03 / 0.1)."""
    client = scalar_client("scaffold", 1)
    client.client_states = [build_broadcast(client_control=-0.2)]
    (update,) = client.update([build_broadcast(model=0.0, control=0.5)], 1)
    assert float(update.tensors["delta/classifier.w"]) == pytest.approx(0.03, abs=1e-12)
    assert float(update.tensors["control_delta/classifier.w"]) == pytest.approx(-0.8, abs=1e-12)
    assert float(update.client_state["client_control/classifier.w"]) == pytest.approx(-1.0, abs=1e-12)


@pytest.mark.parametrize("count", range(1, len(ABSENCES) + 1))
def test_c_is_the_mean_of_all_clients_c_k_whoever_took_part(count):
    run = digits_left("scaffold", ABSENCES[:count], local={"lr": 0.02})
    for name, value in run.strategy.state["control"].items():
        total = sum(memory[f"client_control/{name}"] for memory in run.client_state.values())
        torch.testing.assert_close(value, total / 8, rtol=1e-9, atol=1e-12)


def test_the_first_round_is_fedavgs_and_a_second_is_not():
    rounds, local = ABSENCES[:1] * 2, {"lr": 0.02}
    plain, own = digits_left("fedavg", rounds, weights="uniform", local=local), digits_left("scaffold", rounds, local=local)
    close(own.models[1], plain.models[1], tolerance=1e-12)
    assert any((own.models[2][name] - plain.models[2][name]).abs().max() > 1e-6 for name in own.models[2])


def test_equal_clients_and_a_lone_one_train_as_without_it():
    for targets in ((3, 3, 3), (6,)):
        rounds = [list(range(len(targets)))] * 4
        found = scalar_left("scaffold", rounds, targets=targets, local={"lr_decay": 0.9})
        plain = scalar_left("fedavg", rounds, targets=targets, local={"lr_decay": 0.9})
        assert found.w == pytest.approx(plain.w, rel=1e-12)
