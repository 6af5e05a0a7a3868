"""FedRep: two phases that each leave the other part unchanged, and a last one before evaluation."""

import numpy as np
import pytest
import torch
from hand import EPOCH, heads, whole
from helpers import Schedule, close, config_of, run_strategy, same, slow, workspace_of

from contrafed.data.federation import Federation
from contrafed.data.partition import Partition
from contrafed.engines.grid import LocalGrid
from contrafed.training.batches import Batches


def test_each_phase_leaves_the_other_part_as_it_was():
    """M5, also for FedRep: without head epochs the heads do not change, and without body epochs the body does not."""
    initial = whole("fedrep", [[]])[0]
    body_only, memory, _ = whole("fedrep", head_epochs=0)
    assert all(torch.equal(v, initial[n.split("personal/")[1]]) for n, v in heads(memory).items())
    assert not same(body_only, initial)
    head_only, memory, _ = whole("fedrep", head_epochs=1, local={**EPOCH, "epochs": 0})
    close(head_only, initial, 1e-12)  # the mean of equal models
    assert any(not torch.equal(v, initial[n.split("personal/")[1]]) for n, v in heads(memory).items())


@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
@pytest.mark.parametrize("head", [slow("classifier"), "projector_classifier"])
def test_encoding_once_changes_nothing(monkeypatch, head, dropout):
    """The head phase over stored encoder outputs equals the one over images, alone and stacked."""

    def train_two_rounds(stack_size):
        config = config_of("strategy=fedrep", "num_clients=4", "model=cnn", "model.hidden=16", "model.projection=[9]")
        config["model"]["dropout"] = dropout
        config["strategy"] |= {"head": head, "head_epochs": 3}
        config["strategy"]["local"] |= {"batch_size": 7}
        workspace, grid = workspace_of(config, dtype=torch.float64), LocalGrid(4, stack_size)
        data, dealt = workspace.federation.data, workspace.federation.partition
        parts = [dealt.train(client)[: 20 + 5 * client] for client in range(4)], [dealt.test(client) for client in range(4)]
        workspace.federation = Federation(data, Partition(*parts, data.y.numpy(), data.num_classes))
        models, _ = run_strategy(workspace, config, Schedule([range(4)] * 2), 2, grid=grid)
        return models[-1] | {f"{k}/{n}": v for k in range(4) for n, v in grid.client_states.get(1000 + k).items()}

    once, stacked = train_two_rounds(1), train_two_rounds(3)
    monkeypatch.setattr(Batches, "repeat", False)
    plain = train_two_rounds(1)
    for name in plain:
        np.testing.assert_allclose(once[name], plain[name], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(stacked[name], plain[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("epochs", [3, 0])
@pytest.mark.parametrize("clients", [[0], [2, 0, 3]])
def test_a_frozen_encoder_sees_each_image_once(clients, epochs):
    """No method asks for it. It holds if no gradient passes the encoder, here in a test's own method."""
    config = config_of("strategy=fedavg", "num_clients=4", "model=mlp", "model.hidden=[6]")
    config["strategy"]["local"] |= {"epochs": epochs, "iterations": None}
    workspace, seen = workspace_of(config, dtype=torch.float64), []
    workspace.model.encoder.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[0]))

    class HeadAlone(workspace.client_class):
        def local_update(self, stack):
            self.train(stack, parts=("projector", "classifier"))
            return self.make_upload(stack)

    received = {f"model/{name}": value for name, value in workspace.initial.items()}
    HeadAlone(workspace, clients).update([received] * len(clients), 1)
    # Under vmap one call serves all clients, and a client with fewer examples is padded.
    longest = max(len(workspace.federation.partition.train(client)) for client in clients)
    assert sum(seen) == (longest if epochs else 0)


def test_the_last_evaluation_also_evaluates_a_fitted_head_and_remembers_nothing():
    config = config_of("strategy=fedrep", "num_clients=4", "model=mlp")
    config["partition"]["test_fraction"] = 0.25
    workspace = workspace_of(config)
    client = workspace.client_class(workspace, [0])
    received = {f"model/{n}": v for n, v in workspace.initial.items() if not n.startswith("classifier")}

    def evaluate_models(final):
        found = []
        client.eval_models = lambda stack: found.append(type(client).eval_models(client, stack)) or found[0]
        (score,) = client.evaluate_clients([received], 3, final=final)
        models = {name: {n: v[0] for n, v in model.items()} for name, model in found[0].items()}
        assert same(score.model, models["model"])
        assert set(models) == ({"model", "refit"} if final else {"model"})
        assert {key for key in score.metrics if "/" in key} == ({"refit/accuracy", "refit/loss"} if final else set())
        return models["refit" if final else "model"], score.metrics

    fitted, metrics = evaluate_models(final=True)
    assert metrics["refit/loss"] < metrics["loss"]
    changed = {n for n, v in fitted.items() if not torch.equal(v, workspace.initial[n])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert client.client_states == [{}]
    assert same(evaluate_models(final=False)[0], workspace.initial)
    client.client_states = [{f"personal/{n}": fitted[n].clone() for n in ("classifier.weight", "classifier.bias")}]
    assert same(evaluate_models(final=False)[0], fitted)
    assert not torch.equal(evaluate_models(final=True)[0]["classifier.weight"], fitted["classifier.weight"])
    assert torch.equal(client.client_states[0]["personal/classifier.weight"], fitted["classifier.weight"])
