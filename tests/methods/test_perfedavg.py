"""Per-FedAvg: the golden problem and a step by hand, dealt batches, FedAvg at a = 0, and the exact product."""

from dataclasses import replace

import pytest
import torch
from helpers import FULL_COHORTS, PATTERN, close, config_of, digits_run, strategy_settings, workspace_of
from left import ABSENCES, SHORT_TRAINING, digits_left, scalar_left
from torch.utils._pytree import tree_map

from contrafed.clients.perfedavg import split_batch
from contrafed.training.base import Batch, Client
from contrafed.training.batches import Batches

FIRST_ORDER_VALUES = [2.171900, 2.314250, 2.432131, 2.529747, 2.610584], [2.171900, 2.829950, 2.601332, 2.601332, 2.927713]
SECOND_ORDER_VALUES = [2.155439, 2.286717, 2.397589, 2.491227, 2.570310], [2.155439, 2.753034, 2.558263, 2.558263, 2.860085]


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("gradient", "wanted"),
    [("first_order", FIRST_ORDER_VALUES), ("hessian_free", SECOND_ORDER_VALUES), ("exact", SECOND_ORDER_VALUES)],
)
def test_golden_values(gradient, wanted, stack_size):
    for rounds, values in zip((FULL_COHORTS, PATTERN), wanted, strict=True):
        run = scalar_left("perfedavg", rounds, stack_size=stack_size, inner_lr=0.1, gradient=gradient)
        assert run.w == pytest.approx(values, abs=1e-5)


def test_golden_values_of_evaluating_which_changes_nothing():
    run = scalar_left("perfedavg", FULL_COHORTS, inner_lr=0.1)
    assert [run.evaluate_client(client, final=False) for client in range(3)] == pytest.approx(
        [2.349526, 2.949526, 2.649526], abs=1e-5
    )
    assert run.client_state == {}
    assert [run.evaluate_client(client) for client in range(3)] == [run.evaluate_client(client) for client in range(3)]


def hand(examples, width, count):
    x = torch.arange(width, dtype=torch.float64).view(width, 1, 1, 1)
    batch = Batch(x, torch.arange(width), (torch.arange(width) < examples).double(), {})
    return [part.y[part.mask > 0].tolist() for part in split_batch(batch, count)]


def test_a_batch_is_dealt_out_in_turn_and_a_small_one_is_whole_in_each():
    assert hand(5, 5, 2) == hand(5, 8, 2) == [[0, 2, 4], [1, 3]]
    assert hand(7, 9, 3) == [[0, 3, 6], [1, 4], [2, 5]]
    assert hand(1, 1, 2) == hand(1, 4, 2) == [[0], [0]]
    assert hand(2, 2, 3) == hand(2, 3, 3) == hand(2, 9, 3) == [[0, 1]] * 3
    assert hand(0, 4, 2) == [[], []]


def test_with_a_of_0_it_is_fedavg_on_the_second_halves():
    class Halves(Client):
        def local_update(self, stack):
            self.train(stack, local_training=replace(self.config.local, batch_size=16))
            return self.make_upload(stack)

        def loss(self, params, batch, loss_inputs):
            return super().loss(params, split_batch(batch, 2)[1], loss_inputs)

    run = digits_left("perfedavg", inner_lr=0.0)
    models, _ = digits_run("fedavg", len(ABSENCES), schedule=ABSENCES, client_class=Halves, local=SHORT_TRAINING)
    close(run.models[-1], models[-1], tolerance=1e-12)


def direction(gradient, difference=1e-3):
    """Return the step's direction on a network, with one example in each of a step's batches."""
    config = config_of("strategy=perfedavg", "num_clients=8", "model=mlp", "model.hidden=[16]")
    config["strategy"] = strategy_settings("perfedavg", gradient=gradient, difference=difference, inner_lr=0.5)
    workspace = workspace_of(config, dtype=torch.float64)
    client = workspace.client_class(workspace, [0])
    params = {n: v.detach().clone().requires_grad_() for n, v in workspace.initial.items()}
    batch = Batches.one_pass(workspace, [workspace.federation.partition.train(0)[:1]]).at(0, 1)
    client.loss(params, tree_map(lambda value: value[0], batch), {})["loss"].backward()
    return torch.cat([value.grad.flatten() for value in params.values()])


def test_differences_approach_the_exact_product_and_leaving_it_out_does_not():
    exact = direction("exact")
    errors = [float((direction("hessian_free", delta) - exact).norm()) for delta in (1e-1, 1e-2, 1e-3)]
    assert errors[0] > 50 * errors[1] > 50 * errors[2]
    assert errors[2] < 1e-5 * float((direction("first_order") - exact).norm())
