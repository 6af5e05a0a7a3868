"""MOON: its loss by hand, the golden run, and FedAvg without its contrast."""

import math

import pytest
import torch
from hand import WORK, client_of
from helpers import Schedule, close, config_of, digits_run, run_strategy, workspace_of
from step import loss_of

from contrafed.core.tensors import select_prefix
from contrafed.training.client_stack import each_image


def test_loss_by_hand():
    """cos(z,z_glob) = 1, cos(z,z_prev) = 0, T = 0.5: log(1 + e^-2) = 0.126928."""
    memory = {"previous/classifier.w": torch.tensor([[0.0, 3.0]], dtype=torch.float64)}
    losses, _ = loss_of(client_of("moon"), [2.0, 0.0], [5.0, 0.0], memory)
    assert losses["contrast"].item() == pytest.approx(0.126928, abs=5e-7)


def test_in_a_first_round_it_is_ln2_with_no_gradient():
    client = client_of("moon")
    memory = client.init_client_state({"model/classifier.w": torch.tensor([1.0, 2.0], dtype=torch.float64)})
    losses, w = loss_of(client, [2.0, -1.0], [1.0, 2.0], {n: v[None] for n, v in memory.items()})
    assert losses["contrast"].item() == pytest.approx(math.log(2), rel=1e-12)
    (gradient,) = torch.autograd.grad(losses["contrast"], w)
    assert gradient.abs().max().item() < 1e-12


def test_what_a_client_trained_is_its_previous_model_in_its_next_round():
    """It is not the received model."""
    workspace = workspace_of(config_of("strategy=moon", "num_clients=4", "model=mlp", "model.hidden=[8]"), dtype=torch.float64)
    client, received = workspace.client_class(workspace, [0]), {f"model/{n}": v for n, v in workspace.initial.items()}
    (update,) = client.update([received], 1)
    assert select_prefix(update.client_state, "previous").keys() == workspace.initial.keys()
    for name, previous in select_prefix(update.client_state, "previous").items():
        assert torch.equal(previous, update.tensors[f"model/{name}"])
        assert not torch.equal(previous, received[f"model/{name}"])
    seen, loss, z = [], client.loss, client.represent
    client.loss = lambda params, batch, loss_inputs: (
        seen.append((batch.x, loss_inputs["previous"])) or loss(params, batch, loss_inputs)
    )
    client.client_states = [update.client_state]
    client.update([received], 2)
    for x, previous in seen:
        torch.testing.assert_close(previous, z(select_prefix(update.tensors, "model"), x))
    assert seen


def test_its_first_round_is_fedavgs():
    fedavg, _ = digits_run("fedavg", 2, local=WORK)
    moon, _ = digits_run("moon", 2, local=WORK)
    close(fedavg[1], moon[1])
    with pytest.raises(AssertionError):
        close(fedavg[2], moon[2])


@pytest.mark.parametrize("stack_size", [1, 2])
def test_an_example_is_represented_once_a_round_and_means_the_same(stack_size):
    """Three epochs with stored representations equal three that compute both models for every batch."""
    config = config_of("strategy=moon", "num_clients=30", "model=mlp", "model.hidden=[8]", "partition.min_client_size=5")
    config["strategy"]["local"] |= {"iterations": None, "epochs": 3}
    workspace, calls = workspace_of(config, dtype=torch.float64), {"often": 0, "once": 0}

    class Once(workspace.client_class):
        kind = "once"

        def represent(self, params, x):
            calls[self.kind] += len(x)
            return super().represent(params, x)

    class Often(Once):
        kind = "often"

        def train(self, stack, reference_models, **options):
            def anew(now):
                models = {"global": now.stack.global_model, "previous": select_prefix(now.stack.state, "previous")}
                return {name: each_image(self.represent, params, now.batch.x) for name, params in models.items()}

            assert reference_models.keys() == {"global", "previous"}
            return super().train(stack, before_step=anew, **options)

    models = []
    for kind in (Once, Often):
        workspace.client_class = kind
        models.append(run_strategy(workspace, config, Schedule([[0, 1, 2], [0, 2], [1]]), 3, stack_size=stack_size)[0][-1])
    assert 2 * calls["once"] < calls["often"]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=1e-10)
