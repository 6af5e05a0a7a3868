"""FedALA: a blend by hand, its passes and layers, equality to FedAvg with a fixed A, and the evaluated models."""

import pytest
import torch
from helpers import FULL_COHORTS, PATTERN, close, config_of, same, strategy_settings, workspace_of
from left import build_broadcast, digits_left, scalar_client, scalar_left, stacked_equals_alone

from contrafed.clients.fedala import FedALAClient, top_layers
from contrafed.training.loop import Losses

STILL_BLEND = {"blend_lr": 1e-30}  # 1 less so little is 1


def memory(own, blend=1.0, rounds=2.0):
    return build_broadcast(own=own, blend=blend) | {"participations": torch.tensor(rounds, dtype=torch.float64)}


def learn_blend(passes_of, **changes):
    """Return A after a round of one client, with f = (theta - 1)^2 / 2, own 0, W = 2, eta = 0.1."""
    # ``passes_of``: the client's number of past rounds.
    changes = {"blend_lr": 0.1, "share": 1.0, "local": {"iterations": 0}} | changes
    client = scalar_client("fedala", 1, **changes)
    client.client_states = [memory(0.0, rounds=passes_of)]
    (update,) = client.update([build_broadcast(model=2.0)], 3)
    return float(update.client_state["blend/classifier.w"]), float(update.tensors["model/classifier.w"])


def test_a_blend_by_hand():
    """One pass a round, of one batch, gives A = 0.8. In a second participation the passes continue: 0.68, 0.608."""
    assert learn_blend(2.0) == pytest.approx((0.8, 1.6), abs=1e-12)
    assert learn_blend(5.0) == pytest.approx((0.8, 1.6), abs=1e-12)
    for passes, value in ((1, 0.8), (2, 0.68), (3, 0.608)):
        assert learn_blend(1.0, max_passes=passes) == pytest.approx((value, 2 * value), abs=1e-12)
    assert learn_blend(0.0) == (1.0, 2.0)  # a first participation takes W whole


def test_a_stays_in_its_range():
    """From own = 0 to W = 2 with a target of 1 and rate 10: A = 1 - 10 * 2 goes to 0, from there to 1."""
    assert learn_blend(2.0, blend_lr=10.0)[0] == 0.0
    assert learn_blend(1.0, blend_lr=10.0, max_passes=2)[0] == 1.0


@pytest.mark.parametrize(("settled", "passes"), [(1e9, 11), (0.0, 15)])
def test_the_first_blend_takes_eleven_passes_or_more(monkeypatch, settled, passes):
    taken = []
    train = FedALAClient.train
    monkeypatch.setattr(FedALAClient, "train", lambda self, *a, **k: taken.append(k.get("purpose")) or train(self, *a, **k))
    learn_blend(1.0, settled=settled, max_passes=15)
    assert taken == [f"blend {number}" for number in range(passes)] + [None]


def test_a_blend_is_learned_on_a_share_of_the_examples_drawn_anew_each_round(monkeypatch):
    given, train = [], FedALAClient.train
    monkeypatch.setattr(FedALAClient, "train", lambda self, *a, **k: given.append(k.get("examples")) or train(self, *a, **k))
    config = config_of("strategy=fedala", "strategy.share=0.8", "num_clients=8", "model=mlp")
    workspace = workspace_of(config, dtype=torch.float64)
    own = set(workspace.federation.partition.train(0).tolist())
    sent = {f"model/{name}": value for name, value in workspace.initial.items()}
    for server_round in (2, 3):
        client = workspace.client_class(workspace, [0])
        client.client_states = [client.init_client_state(sent) | {"participations": torch.tensor(2.0, dtype=torch.float64)}]
        client.update([sent], server_round)
    first, second = ([*some[0].tolist()] for some in given if some is not None)
    assert len(first) == len(set(first)) == len(second) == round(0.8 * len(own)) < len(own)
    assert set(first) | set(second) <= own
    assert set(first) != set(second)


def test_where_own_and_received_are_one_a_gets_no_gradient():
    client = scalar_client("fedala", 1, local={"iterations": 0})
    client.client_states = [memory(2.0, blend=0.3)]
    (update,) = client.update([build_broadcast(model=2.0)], 3)
    assert float(update.client_state["blend/classifier.w"]) == 0.3


@pytest.mark.parametrize("rounds", [FULL_COHORTS, PATTERN])
def test_golden_run_with_a_of_1_is_fedavgs(rounds):
    run = scalar_left("fedala", rounds, **STILL_BLEND)
    assert run.w == pytest.approx(scalar_left("fedavg", rounds).w, rel=1e-12)
    assert [run.evaluate_client(client) for client in range(3)] == run.list_state_numbers("own/classifier.w")


def test_with_a_of_1_it_is_fedavg_and_with_0_in_all_layers_local():
    run, plain = digits_left("fedala", layers=99, max_passes=1, **STILL_BLEND), digits_left("fedavg")
    for one, other in zip(run.models, plain.models, strict=True):
        close(one, other, tolerance=1e-12)

    class Own(FedALAClient):
        def init_client_state(self, received):
            fresh = super().init_client_state(received)
            return fresh | {name: torch.zeros_like(value) for name, value in fresh.items() if name.startswith("blend/")}

    rounds = [[0, 1, 2]] * 3  # a client's first participation starts from that round's W
    own = digits_left("fedala", rounds, layers=99, max_passes=1, client_class=Own, **STILL_BLEND)
    alone = digits_left("local", rounds)
    for client in alone.client_state:
        close(own.own(client), alone.own(client, "personal"), tolerance=1e-12)


def test_layers_are_counted_from_the_classifier_down():
    model = workspace_of(config_of("model=mlp", "model.projection=[12]")).model
    assert top_layers(model, 1) == ["classifier.weight", "classifier.bias"]
    assert top_layers(model, 2) == ["projector.0.weight", "projector.0.bias", "classifier.weight", "classifier.bias"]
    assert top_layers(model, 99) == [name for name, _ in model.named_parameters()]


def test_lower_layers_are_the_received_ones():
    config = config_of("strategy=fedala", "num_clients=8", "model=mlp")
    config["strategy"] = strategy_settings("fedala", blend_lr=0.01, local={"epochs": 0})
    workspace = workspace_of(config, dtype=torch.float64)
    client = workspace.client_class(workspace, [0])
    known = {f"model/{name}": value for name, value in workspace.initial.items()}
    client.client_states = [{n: v + 0.1 if n.startswith("own/") else v + 2 for n, v in client.init_client_state(known).items()}]
    client.client_states[0] |= {
        f"blend/classifier.{n}": client.client_states[0][f"blend/classifier.{n}"] - 2.5 for n in ("weight", "bias")
    }
    (update,) = client.update([known], 3)
    for name, value in workspace.initial.items():
        sent, blend = update.tensors[f"model/{name}"], update.client_state.get(f"blend/{name}")
        wanted = value if blend is None else value + 0.1 * (1 - blend)
        torch.testing.assert_close(sent, wanted, rtol=0, atol=1e-12)
        assert blend is None or 0.2 < float(blend.mean()) < 0.8


def test_a_client_is_evaluated_by_what_it_trained_and_beside_it_by_the_blend():
    client = scalar_client("fedala", 1)
    client.client_states = [memory(0.0, blend=0.25)]
    (evaluated,) = client.evaluate_clients([build_broadcast(model=2.0)], 3, split="train")
    assert float(evaluated.model["classifier.w"]) == 0.0
    assert set(evaluated.metrics) == {"loss", "accuracy", "blend/loss", "blend/accuracy"}


def test_the_blend_that_is_evaluated_after_local_work_has_the_received_lower_layers():
    workspace = workspace_of(config_of("strategy=fedala", "num_clients=8", "model=mlp"), dtype=torch.float64)
    client, models = workspace.client_class(workspace, [0]), {}
    evaluated = client.eval_models
    client.eval_models = lambda stack: models.update(evaluated(stack)) or models
    client.evaluate_clients(
        [{f"model/{name}": value for name, value in workspace.initial.items()}], 3, split="train", after_training=True
    )
    lower = [name for name in workspace.initial if not name.startswith("classifier")]
    assert lower
    for name in lower:
        assert torch.equal(models["blend"][name][0], workspace.initial[name])
        assert not torch.equal(models["model"][name][0], workspace.initial[name])


def test_the_last_loss_of_each_client():
    counts = torch.tensor([[2.0, 2.0, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    rows = [{"loss": torch.tensor([1.0, 2.0])}, {"loss": torch.tensor([3.0, 4.0])}, {"loss": torch.tensor([5.0])}]
    assert Losses([3, 2, 0], counts, rows).last("loss").tolist() == [5.0, 4.0, 0.0]


@pytest.mark.slow
def test_stacked_equals_alone_though_passes_differ():
    alone = stacked_equals_alone("fedala", settled=0.05, max_passes=16)
    moved = [float((1 - alone.own(client, "blend")["classifier.weight"]).abs().max()) for client in sorted(alone.client_state)]
    assert sum(value > 0.01 for value in moved) >= 4
    assert not any(same(alone.own(client), alone.models[-1]) for client in alone.client_state)
