"""FedPPO: draws, rewards and returns by hand, the agent's learning, and equality to FedAvg if all clients are selected."""

import math

import numpy as np
import pytest
import torch
from hand import rule_of
from helpers import config_of, digits_run, same, workspace_of

from contrafed.core.randomness import torch_generator
from contrafed.core.tensors import select_prefix
from contrafed.server.base import Replies, Reply, Round
from contrafed.strategies.fedppo import compute_rewards
from contrafed.strategies.ppo import Learning, compute_log_probabilities, compute_returns, draw, forward, init_agent, learn

ALL_AVAILABLE = torch.ones(3, dtype=torch.bool)
ROUNDS = [[0, 1, 2, 3, 4, 5], [1, 2, 5], [], [0, 1, 4, 5], [2, 3], [0, 1, 2, 3, 4, 5, 6, 7], [4]]
EARLY_LEARNING = {"choose": 2, "update_every": 2, "entropy_weight": 0.0}


def test_the_log_probability_of_a_draw_by_hand():
    """Logits (log 2, 0, 0), drawn 1 and then 2: log(2/4) + log(1/2)."""
    logits = torch.tensor([math.log(2), 0.0, 0.0])
    logs, entropy = compute_log_probabilities(logits, ALL_AVAILABLE, [0, 1])
    assert logs.tolist() == pytest.approx([math.log(1 / 2), math.log(1 / 2)], rel=1e-6)
    assert entropy[1].item() == pytest.approx(math.log(2), rel=1e-6)
    masked, _ = compute_log_probabilities(logits, torch.tensor([False, True, True]), [2])
    assert masked.tolist() == pytest.approx([math.log(1 / 2)], rel=1e-6)


def test_rewards_by_hand():
    """acc 0.5 and acc_G 0.4, with losses that fell by 1 and 3, give 0.6 and 0.8. Equal decreases share equally."""
    half = np.array([0.5, 0.5])
    assert compute_rewards(half, 0.4, np.array([2.0, 5.0]), np.array([1.0, 2.0])).tolist() == pytest.approx([0.6, 0.8])
    assert compute_rewards(half, 0.4, np.zeros(2), np.array([1.0, 9.0])).tolist() == pytest.approx([0.7, 0.7])


def test_who_is_rewarded_for_what_by_hand():
    """Clients with 3 and 1 examples have acc 0.5 and 0.7."""
    # The received model has 0.4 and 0.8, so acc_G = 0.5. The losses fell by 1 and 3.
    rule = rule_of("fedppo", (3, 1), update_every=2)
    rule.state["loss"][:], rule.drawn = [2.0, 5.0], {"chosen": torch.tensor([1, 0])}
    rule.round = Round(1, np.array([0, 1]))
    reports = [(0.5, 0.4, 1.0, 3), (0.7, 0.8, 2.0, 1)]
    replies = [
        Reply(
            client,
            {
                "model/w": torch.ones(1),
                "report/accuracy": torch.tensor(accuracy),
                "report/received_accuracy": torch.tensor(received),
            },
            size,
            {"loss": loss},
        )
        for client, (accuracy, received, loss, size) in enumerate(reports)
    ]
    rule.aggregate({"w": torch.zeros(1)}, Replies(replies))
    clients, rewards = rule.round.client_metrics["reward"]
    assert clients.tolist() == [0, 1]
    assert rewards.tolist() == pytest.approx([0.5 + 0.5 / 4, 0.7 + 0.5 * 3 / 4])
    assert rule.state["global_accuracy"] == pytest.approx(0.5)
    assert rule.state["accuracy"].tolist() == pytest.approx([0.5, 0.7])
    assert rule.state["loss"].tolist() == [1.0, 2.0]
    assert rule.state["rollout"][0]["rewarded"].tolist() == [1, 0]  # their places in the draw


def test_a_reported_accuracy_counts_within_its_range():
    rule = rule_of("fedppo", (3, 1), update_every=2)
    rule.drawn, rule.round = {"chosen": torch.tensor([0, 1])}, Round(1, np.array([0, 1]))
    names = ("model/w", "report/accuracy", "report/received_accuracy")
    replies = [
        Reply(client, dict(zip(names, map(torch.tensor, ([1.0], *report)), strict=True)), 1, {"loss": 1.0})
        for client, report in enumerate([(1000.0, -7.0), (0.5, 0.5)])
    ]
    rule.aggregate({"w": torch.zeros(1)}, Replies(replies))
    assert rule.state["accuracy"].tolist() == [1, 0.5]
    assert rule.state["global_accuracy"] == 0.25


def test_a_client_reports_the_accuracy_of_the_received_and_of_the_trained_model():
    workspace = workspace_of(config_of("strategy=fedppo", "num_clients=8", "model=mlp"), dtype=torch.float64)
    (update,) = workspace.client_class(workspace, [0]).update([{f"model/{n}": v for n, v in workspace.initial.items()}], 1)
    index = torch.from_numpy(workspace.federation.partition.train(0))
    found = []
    for params in (workspace.initial, select_prefix(update.tensors, "model")):
        with workspace.model.holding(params) as model:
            right = model(workspace.images(index)).logits.argmax(1) == workspace.y[index]
        found.append(right.double().mean().item())
    assert found[0] < found[1]
    reported = [update.tensors[f"report/{which}"].item() for which in ("received_accuracy", "accuracy")]
    assert reported == pytest.approx(found)


def test_returns_by_hand():
    """Rewards (1, 3), then 2, discount 0.5: the second round's return 2, the first's 1 + 1 and 3 + 1."""
    rollout = [{"rewards": torch.tensor([1.0, 3.0])}, {"rewards": torch.tensor([2.0])}]
    assert [some.tolist() for some in compute_returns(rollout, 0.5)] == [[2.0, 4.0], [2.0]]


def test_an_agent_that_has_not_learned_draws_uniformly_without_replacement_and_only_who_is_there():
    agent = init_agent(4, seed=0)
    logits = forward({n.removeprefix("actor/"): v for n, v in agent.items() if n.startswith("actor/")}, torch.rand(5))
    assert not logits.any()
    allowed = torch.tensor([True, False, True, True])
    seen = np.zeros(4)
    for t in range(2000):
        chosen = draw(logits, allowed, 2, torch_generator(0, "ppo", t))
        assert len(set(chosen)) == 2
        seen[chosen] += 1
    assert seen[1] == 0
    assert np.abs(seen[[0, 2, 3]] / 2000 - 2 / 3).max() < 0.03  # three standard deviations
    assert draw(logits, allowed, 9, torch_generator(0, "ppo", 0)).__len__() == 3


def test_draws_follow_the_softmax():
    logits = torch.tensor([math.log(2), 0.0, 0.0])
    first = [draw(logits, ALL_AVAILABLE, 1, torch_generator(0, "ppo", t))[0] for t in range(2000)]
    assert np.mean(np.array(first) == 0) == pytest.approx(0.5, abs=0.03)


def test_the_agent_learns_whom_to_choose():
    """Only client 0 gives a reward, so after a while it is far likelier."""
    agent, adam, state = init_agent(2, seed=0), {}, torch.zeros(3)
    both = torch.ones(2, dtype=torch.bool)
    for t in range(20):
        rollout = []
        for i in range(5):
            logits = forward({n.removeprefix("actor/"): v for n, v in agent.items() if n.startswith("actor/")}, state)
            chosen = draw(logits, both, 1, torch_generator(0, "ppo", 5 * t + i))
            logs, _ = compute_log_probabilities(logits, both, chosen)
            past = {"state": state, "allowed": both, "chosen": torch.tensor(chosen), "logs": logs}
            rollout.append(past | {"rewarded": torch.tensor([0]), "rewards": torch.tensor([float(chosen[0] == 0)])})
        learn(agent, adam, rollout, 0.0, Learning(0.03, 0.2, 5, 0.0))
    assert logits[0] - logits[1] > 1
    assert int(adam["actor/0.weight/step"]) == 100


def move_actor(how, ratios=(1.0, 1.0)):
    """Return how far the actor's last numbers move in learning that client 0 pays and client 1 does not, and Adam's steps."""
    # Both have probability 1/2. ``ratios`` divide it by the probability at selection.
    agent, adam, both = init_agent(2, seed=0), {}, torch.ones(2, dtype=torch.bool)
    rollout = [
        {"state": torch.ones(3), "allowed": both, "chosen": torch.tensor([k]), "logs": torch.tensor([math.log(0.5 / ratio)])}
        | {"rewarded": torch.tensor([0]), "rewards": torch.tensor([1.0 - k])}
        for k, ratio in enumerate(ratios)
    ]
    learn(agent, adam, rollout, 0.0, how)
    return agent["actor/2.bias"].tolist(), int(adam["actor/2.bias/step"])


@pytest.mark.parametrize("rate", [0.001, 0.02])
def test_the_agents_rate_is_how_far_its_first_step_goes(rate):
    """With Adam, every number with a gradient moves by the rate."""
    change, steps = move_actor(Learning(rate, 0.2, 1, 0.0))
    assert change == pytest.approx([rate, -rate], rel=1e-3)
    assert steps == 1


def test_a_choice_that_has_gained_more_than_the_clip_moves_nothing():
    """Ratios 1.5 and 0.5 are within 1 +- 0.6 and outside of 1 +- 0.2. In the opposite direction there is no gain yet."""
    for clip, ratios, expected in ((0.6, (1.5, 0.5), 0.01), (0.2, (1.5, 0.5), 0.0), (0.2, (0.5, 1.5), 0.01)):
        change, _ = move_actor(Learning(0.01, clip, 1, 0.0), ratios)
        assert change == pytest.approx([expected, -expected], rel=1e-3)


def test_the_rule_learns_as_it_is_told(monkeypatch):
    """Seven rounds, six with a reply, and an update after every second round. The rollout has what there was to learn from."""
    told = {"agent_lr": 0.02, "agent_clip": 0.3, "agent_epochs": 3, "entropy_weight": 0.05, "discount": 0.4}
    seen = []

    def record_learning(agent, adam, rollout, discount, how):
        seen.append((len(rollout), discount, how))
        return learn(agent, adam, rollout, discount, how)

    monkeypatch.setattr("contrafed.strategies.fedppo.learn", record_learning)
    _, rule = digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), choose=2, update_every=2, **told)
    assert seen == [(rounds, 0.4, Learning(0.02, 0.3, 3, 0.05)) for rounds in (2, 1, 2)]
    assert int(rule.state["adam"]["actor/0.weight/step"]) == 3 * 3
    _, idle = digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), **EARLY_LEARNING, agent_epochs=0)
    assert same(idle.state["agent"], init_agent(8, idle.seed))


def test_away_clients_are_never_chosen_and_a_run_repeats():
    models, rule = digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), **EARLY_LEARNING)
    again, other = digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), **EARLY_LEARNING)
    assert same(models[-1], again[-1])
    assert same(models[2], models[3])  # no client was available
    assert any(not torch.equal(rule.state["agent"][n], v) for n, v in init_agent(8, rule.seed).items())
    assert same(rule.state["agent"], other.state["agent"])


def test_with_everybody_chosen_it_is_fedavg():
    everybody, _ = digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), choose=8)
    fedavg, _ = digits_run("fedavg", schedule=ROUNDS, num_rounds=len(ROUNDS))
    assert same(everybody[-1], fedavg[-1])


def test_a_share_is_of_the_clients_to_select_from():
    asked = []

    class Seen(_rule()):
        def select(self, server_round):
            asked.append(super().select(server_round))
            return asked[-1]

    digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), rule=Seen, choose=0.5)
    assert [len(chosen) for chosen in asked] == [-(-len(there) // 2) for there in ROUNDS]


@pytest.mark.parametrize("choose_from", ["all", "everyone"])
def test_blind_choices_train_who_is_available_or_all_of_them(choose_from):
    asked = []

    class Seen(_rule()):
        def select(self, server_round):
            chosen = super().select(server_round)
            asked.append(chosen.tolist())
            return chosen

    digits_run("fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), rule=Seen, choose=3, choose_from=choose_from)
    blind = choose_from == "everyone"
    assert all(set(chosen) <= set(there) for chosen, there in zip(asked, ROUNDS, strict=True)) is not blind
    assert ({len(chosen) for chosen in asked} == {3}) is blind


def test_a_failed_client_gives_no_reward_and_the_agent_still_learns():
    import contrafed.clients.fedppo

    class Fails(contrafed.clients.fedppo.FedPPOClient):
        def local_update(self, stack):
            if 5 in stack.clients:
                raise RuntimeError("broken")
            return super().local_update(stack)

    models, rule = digits_run(
        "fedppo", schedule=ROUNDS, num_rounds=len(ROUNDS), may_fail=True, client_class=Fails, **{**EARLY_LEARNING, "choose": 4}
    )
    assert rule.state["accuracy"][5] == 0
    assert all(torch.isfinite(v).all() for v in rule.state["agent"].values())
    assert any((models[-1][n] != models[0][n]).any() for n in models[0])


def _rule():
    from contrafed.strategies.fedppo import FedPPO

    return FedPPO
