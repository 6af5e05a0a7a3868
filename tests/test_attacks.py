"""Clients that attack, in simulation: what they send by hand, who they are, and that nothing else changes."""

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from helpers import Scalar, Schedule, config_of, run_strategy, same, scalar_settings, scalar_workspace
from safetensors.torch import load_file
from tiny import TINY_RUN
from wire import rows_of

from contrafed.client_app.app import app
from contrafed.config.run_config import resolve
from contrafed.core import registry
from contrafed.core.client_run import choose
from contrafed.data.federation import load_federation
from contrafed.data.images import ImageData
from contrafed.data.label_flip import flip_labels
from contrafed.data.partition import Partition
from contrafed.engines.attack import Attack, moments, wrap_in_attack
from contrafed.engines.worker import identify
from contrafed.runs.notices import said_of_attackers, said_of_delta
from contrafed.runs.run import run
from contrafed.strategies.attacks.alie import z_max

UPDATES = ("sign_flip", "scale", "noise", "alie", "ipm")


def chosen(name, **changes):
    return choose("attack", config_of(f"attack={name}")["attack"] | changes)


def attack(name, seed=0, **changes):
    choice = chosen(name, **changes)
    return registry.only_subclass(choice.module, Attack)(choice.config, seed)


def test_attackers_are_drawn_by_the_seed_and_more_of_them_have_the_fewer_among_them():
    few, more = (chosen("ipm", fraction=f).config.among(50, 0) for f in (0.1, 0.3))
    assert (len(few), len(more)) == (5, 15)
    assert set(few) < set(more)
    assert list(more) == sorted(more)
    assert chosen("scale", fraction=0.3).config.among(50, 0) == more  # for any attack
    assert chosen("ipm", fraction=0.3).config.among(50, 1) != more
    assert chosen("ipm", fraction=0.0).config.among(50, 0) == ()
    assert chosen("ipm", clients=[7, 3, 7]).config.among(8, 0) == (3, 7)


@pytest.mark.parametrize(("base", "parent"), [("", "(Attackers)"), ("(Attack)", "")])
def test_an_attack_of_ones_own_that_would_attack_nobody(on_path, base, parent, expect_error):
    imports = "from dataclasses import dataclass\nfrom contrafed.engines.attack import Attack, Attackers\n"
    config = f"@dataclass(frozen=True)\nclass Config{parent}:\n    pass\n"
    mine = f"class Mine{base}:\n    def one(self, change, *_):\n        return change\n"
    (on_path / "lab").mkdir()
    (on_path / "lab" / "mine.py").write_text(f"{imports}\n\n{config}\n\n{mine}")
    who = {"fraction": 0.1, "clients": None} if parent else {}
    with expect_error():
        resolve(config_of() | {"attack": {"name": "mine", "module": "lab.mine", **who}})


def test_without_an_attack_there_is_nothing_in_between():
    grid = object()
    assert wrap_in_attack(grid, chosen("label_flip"), 8, 0) is grid
    assert wrap_in_attack(grid, choose("attack", config_of()["attack"]), 8, 0) is grid
    assert resolve(config_of()).client.flipped == ()


@pytest.mark.parametrize(
    ("name", "changes", "model"),
    [
        ("sign_flip", {}, 2 + (-0.38 - 0.76 + 0.19) / 3),
        ("sign_flip", {"factor": 2.0}, 2 + (-0.38 - 1.52 + 0.19) / 3),
        ("scale", {}, 2 + (-0.38 + 7.6 + 0.19) / 3),
        ("ipm", {}, 2 + (-0.38 + 0.0475 + 0.19) / 3),  # the honest mean is -0.095
        ("ipm", {"epsilon": 2.0}, 2 + (-0.38 + 0.19 + 0.19) / 3),
        ("alie", {"z": 1.0}, 2 + (-0.38 - 0.38 + 0.19) / 3),  # and their std 0.285
        ("alie", {}, 2 + (-0.38 - 0.095 + 0.19) / 3),  # z_max of 3 with 1 attacker is 0
        ("alie", {"z": 1.0, "known": "attackers"}, 2.19),  # one attacker knows itself alone, so the std is 0
    ],
)
def test_a_round_by_hand(name, changes, model):
    """Two exact steps of 0.1 from W = 2 towards a = (0, 6, 3) give updates (-0.38, 0.76, 0.19). Client 1 uploads another."""
    settings = scalar_settings(weights="uniform")
    workspace = scalar_workspace(settings, Scalar(2.0))

    def wrap(grid):
        grid = wrap_in_attack(grid, chosen(name, clients=[1], **changes), 3, 0)
        grid.members(workspace.run, workspace.federation, {})
        return grid

    models, _ = run_strategy(workspace, settings, Schedule([[0, 1, 2], [0, 2]]), 2, wrap=wrap)
    assert float(models[1]["classifier.w"]) == pytest.approx(model, abs=1e-6)
    assert float(models[2]["classifier.w"]) == pytest.approx(1.5 + 0.81 * (model - 1.5), abs=1e-6)  # no client attacks


@pytest.mark.parametrize(
    ("participants", "attackers", "z"),
    [
        (50, 24, 1.42608),  # s = 26 - 24 = 2: Phi(z) < 24 / 26
        (20, 9, 0.90846),  # s = 11 - 9 = 2: 9 / 11
        (10, 3, 0.18001),  # s = 6 - 3 = 3: 4 / 7
        (10, 1, 0.0),  # s = 5: 4 / 9, below one half
        (5, 3, 0.0),  # a majority: s counts as 1, 1 / 2
        (9, 5, 0.67449),  # s = 1: 3 / 4
        (3, 3, 0.0),
        (1, 0, 0.0),
    ],
)
def test_alies_z_by_hand(participants, attackers, z):
    assert z_max(participants, attackers) == pytest.approx(z, abs=1e-5)


def test_moments_by_hand_skip_what_nobody_holds():
    nan = float("nan")
    rows = [{"a": torch.tensor([1.0, nan, nan])}, {"a": torch.tensor([3.0, 4.0, nan])}]
    mean, spread = moments(rows)
    assert mean["a"][:2].tolist() == [2, 4]
    assert spread["a"][:2].tolist() == [1, 0]
    assert bool(mean["a"][2].isnan())


def test_noise_is_a_function_of_seed_round_and_client_and_as_large_as_was_asked():
    change = {"delta/a": torch.full((40_000,), 0.5), "delta/b": torch.full((40_000,), 4.0)}
    sent = attack("noise", level=3.0).one(change, 2, 7)
    assert same(sent, attack("noise", level=3.0).one(change, 2, 7))
    for other in (
        attack("noise", seed=1).one(change, 2, 7),
        attack("noise").one(change, 3, 7),
        attack("noise").one(change, 2, 8),
    ):
        assert not torch.equal(other["delta/a"], sent["delta/a"])
    for name, size in (("delta/a", 0.5), ("delta/b", 4.0)):
        assert float((sent[name] - change[name]).std()) == pytest.approx(3 * size, rel=0.02)
        assert float((sent[name] - change[name]).mean()) == pytest.approx(0, abs=3 * size * 4 / 200)


@pytest.mark.parametrize("name", UPDATES)
def test_attackers_that_know_nobody_send_their_own_and_others_always_theirs(name):
    own = {3: {"delta/a": torch.tensor([1.0, 2.0])}}
    found = attack(name).replace(own, {}, 1)
    assert found.keys() == {3}
    if name in ("alie", "ipm"):
        assert found[3]["delta/a"].tolist() == [1, 2]


def run_attack(folder, *overrides):
    summary = run(config_of(*TINY_RUN, "engine=local", "participation=full", *overrides, f"output_dir={folder}"))
    return load_file(folder / "model.safetensors"), (folder / "metrics.csv").read_bytes(), summary


def test_prototypes_are_attacked_where_a_method_sends_them(tmp_path):
    """FedProto's replies are prototypes alone. If all clients reverse theirs, so is the server's table."""
    found = {}
    for fraction in (0.0, 1.0):
        flip = ("attack=sign_flip", f"attack.fraction={fraction}", "num_rounds=1", "checkpoint_every=1")
        run_attack(tmp_path / str(fraction), "strategy=fedproto", *flip)
        found[fraction] = load_file(tmp_path / str(fraction) / "checkpoints" / "000001" / "server.safetensors")
    means = next(name for name in found[0.0] if name.endswith("means"))
    assert found[0.0][means].abs().sum() > 0
    assert torch.equal(found[1.0][means], -found[0.0][means])


@pytest.mark.parametrize("name", ["sign_flip", "alie"])
def test_a_method_that_sends_changes_is_attacked_alike(tmp_path, name):
    """SCAFFOLD uploads updates. Without control variates its first model is FedAvg's, with and without an attack."""
    both = (f"attack={name}", "attack.clients=[1,2]", "num_rounds=1", "strategy.local.lr=0.02")
    training = ("strategy.local.iterations=5", "strategy.local.epochs=null", "strategy.local.batch_size=16")
    sent, _, summary = run_attack(tmp_path / "a", "strategy=scaffold", *both, *training)
    plain, *_ = run_attack(tmp_path / "b", "strategy=fedavg", "strategy.weights=uniform", *both, *training)
    for key, value in plain.items():
        torch.testing.assert_close(sent[key], value, rtol=1e-5, atol=1e-6)
    assert (summary["attack"], summary["attackers"]) == (name, [1, 2])


def test_a_long_change_ruins_a_mean_and_not_a_median(tmp_path):
    attack = ("strategy=fedavg", "attack=scale", "attack.factor=100", "attack.clients=[0]", "num_rounds=4")
    final = {}
    for name in ("mean", "median"):
        _, metrics, summary = run_attack(tmp_path / name, *attack, f"aggregation={name}")
        final[name] = summary["accuracy_final"]
        assert summary.get("aggregation", "mean") == name
        assert not any(rows_of(metrics, "replies_rejected").values())
    assert final["mean"] < final["median"] - 0.1


def test_the_bound_on_replies_meets_attackers_too(tmp_path):
    bound = (
        "strategy=scaffold", "engine.max_norm=100", "attack=scale", "attack.factor=1e6", "attack.clients=[0]", "num_rounds=2",
    )  # fmt: skip
    _, metrics, _ = run_attack(tmp_path / "run", *bound)
    assert rows_of(metrics, "replies_rejected") == {1: 1, 2: 1}


def test_an_attacked_run_goes_on_bit_for_bit(tmp_path):
    how = ("strategy=pmfl", "attack=noise", "attack.clients=[1,4]", "participation.loss_rate=0.2", "num_rounds=4")
    whole, metrics, _ = run_attack(tmp_path / "whole", *how, "checkpoint_every=2")
    rest, again, _ = run_attack(tmp_path / "rest", *how, f"resume={tmp_path}/whole/checkpoints/000002")
    assert same(whole, rest)
    assert metrics == again


def test_clients_that_are_asked_say_their_true_classes():
    """Flower's clients are asked for their classes, and the cohort must not depend on the attackers."""
    identify()
    settings = resolve(config_of(*TINY_RUN, "attack=label_flip", "attack.clients=[1]")).client.to_json()
    query = Message(RecordDict({"config": ConfigRecord({"settings": settings})}), 10, MessageType.QUERY)
    answer = app(query, Context(1, 10, {"partition-id": 1}, RecordDict(), {})).content["metrics"]
    true = load_federation(resolve(config_of(*TINY_RUN)).client).partition.class_counts()[1]
    assert answer["class-counts"] == true.tolist() != true[::-1].tolist()


def test_wrong_labels_by_hand():
    """Clients 0 and 1 share example 1, and only client 1 attacks."""
    # Its copies of 1 and 2 are of classes 3 - 1 - 0 and 3 - 1 - 2.
    x, y = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1), torch.tensor([0, 0, 2, 1, 2])
    test = torch.tensor([False, False, False, False, True])
    data = ImageData(x, y, test, (0.5,), (0.5,), 3, np.array([0, 0, 1, 1, 1]))
    true = Partition([np.array([0, 1]), np.array([1, 2])], [np.array([3]), np.array([3])], y.numpy(), 3)
    more, partition = flip_labels(data, true, (1,))
    assert partition.train(0).tolist() == [0, 1]
    assert partition.train(1).tolist() == [5, 6]
    assert partition.true_train(1).tolist() == [1, 2]  # the labels for evaluation
    assert more.y.tolist() == [0, 0, 2, 1, 2, 2, 0]
    assert more.x.flatten().tolist() == [0, 1, 2, 3, 4, 1, 2]
    assert more.test.tolist() == [*test.tolist(), False, False]
    assert more.owner.tolist() == [0, 0, 1, 1, 1, 0, 1]
    assert partition.test(1).tolist() == [3]
    assert partition.sizes.tolist() == [2, 2]
    assert partition.test_sizes.tolist() == true.test_sizes.tolist() == [1, 1]
    assert partition.class_counts().tolist() == true.class_counts().tolist()
    assert np.array_equal(partition.class_proportions(), true.class_proportions())


@pytest.mark.parametrize("name", ["dirichlet", "sampled"])
def test_label_flip_reaches_the_clients_and_nothing_else(name):
    plain, wrong = (resolve(config_of(f"partition={name}", f"attack={a}", "attack.clients=[3]")) for a in ("ipm", "label_flip"))
    assert (plain.client.flipped, wrong.client.flipped) == ((), (3,))
    assert type(wrong.client).from_json(wrong.client.to_json()).flipped == (3,)
    one, other = load_federation(plain.client), load_federation(wrong.client)
    for client in (2, 3):
        right, found = (federation.data.y[federation.partition.train(client)] for federation in (one, other))
        assert torch.equal(found, 9 - right if client == 3 else right)
    assert np.array_equal(one.central_test, other.central_test)
    assert np.array_equal(one.partition.class_proportions(), other.partition.class_proportions())


def resolve_overrides(*overrides):
    return resolve(config_of("strategy=fedavg", *overrides))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), ""),
        (("attack=ipm", "num_clients=10"), "2 of 10 clients attack: attack=ipm"),
        (("attack=label_flip", "attack.clients=[0,3,4]", "num_clients=10"), "3 of 10 clients attack: attack=label_flip"),
        (("attack=ipm", "attack.fraction=0"), ""),
        (("attack=ipm", "attack.clients=[3,7]", "held_out_clients=2", "num_clients=10"), "2 of 8 clients attack: attack=ipm"),
        (("attack=ipm", "attack.fraction=0.5", "held_out_clients=2", "num_clients=10"), "4 of 8 clients attack: attack=ipm"),
    ],
)
def test_how_many_attack(asked, said):
    assert said_of_attackers(resolve_overrides(*asked)) == said


@pytest.mark.parametrize("seed", range(4))
def test_held_out_clients_keep_their_labels(seed):
    flipped = resolve_overrides(
        "attack=label_flip", "attack.fraction=0.5", "held_out_clients=6", "num_clients=10", f"seed={seed}"
    ).client.flipped
    assert len(flipped) == 2
    assert max(flipped) < 4


@pytest.mark.parametrize(("delta", "loose"), [("0.00001", False), ("0.24", False), ("0.25", True), ("0.9", True)])
def test_a_delta_that_lets_a_client_be_told_apart_is_said(delta, loose):
    line = said_of_delta(resolve_overrides("privacy=central", f"privacy.delta={delta}", "num_clients=4"))
    assert line.startswith(f"privacy.delta={delta} is not below 1/num_clients=0.25: ") if loose else line == ""
