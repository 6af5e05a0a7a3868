"""Methods of one kind: a step by hand, who holds a class, equal models, and clients that were never selected."""

import pytest
import torch
from hand import LOCAL, golden_memory, path, rule_of
from helpers import FULL_COHORTS, PATTERN, same, slow
from left import build_broadcast, digits_left, scalar_client, scalar_left

from contrafed.server.base import Replies, Reply

FIXED_ALPHA, RATE = {"alpha": 0.75, "adaptive": False}, {"local": {"lr": 0.01}}
CLOUD = {"cloud_lr": 0.5, "sigma": 1.0, "relative": False, "cap": False}


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("name", "changes", "rounds", "w", "own"),
    [
        ("ditto", {"pull_weight": 1.0}, FULL_COHORTS[:3], [2.468559], [1.345934, 3.559502, 2.452718]),
        ("ditto", {"pull_weight": 0.75}, FULL_COHORTS[:3], [2.468559], [1.282257, 3.629801, 2.456029]),
        ("ditto", {"pull_weight": 0.0}, FULL_COHORTS[:3], [2.468559], [1.062882, 3.874236, 2.468559]),
        ("ditto", {"pull_weight": 1.0}, PATTERN, [2.997660], [1.574102, 3.613747, 2.516628]),
        ("fedamp", CLOUD, FULL_COHORTS[:3], [2.0] * 3, [1.341951, 3.514475, 2.428213]),  # without a global model
        ("fedamp", CLOUD, PATTERN, [2.0] * 5, [1.403248, 3.587681, 2.298687]),
        # Restarting theta at w for each batch would give W^3 = 2.016252.
        ("pfedme", RATE, FULL_COHORTS[:3], [2.006502, 2.012961, 2.019379], [1.906161, 2.224498, 2.065330]),
        ("pfedme", RATE, PATTERN, [2.006502, 2.032467, 2.029005, 2.029005, 2.045071], [1.924632, 2.239690, 2.080522]),
    ],
)
def test_golden_values(name, changes, rounds, w, own, stack_size):
    """The last W, and the clients' own models, by which they are evaluated."""
    run = scalar_left(name, rounds, stack_size=stack_size, **changes)
    assert run.w[-len(w) :] == (w if name == "fedamp" else pytest.approx(w, abs=1e-5))
    assert run.list_state_numbers("own/classifier.w") == pytest.approx(own, abs=1e-5)
    assert [run.evaluate_client(client) for client in range(3)] == run.list_state_numbers("own/classifier.w")
    assert run.strategy.has_global_model == (name != "fedamp")


@pytest.mark.parametrize(
    ("name", "target", "start", "changes", "sent", "state"),
    [
        # f = (v - 3)^2 / 2, v = 2, W = 0, lambda = 1, eta = 0.1 give 1.9. v is pulled towards the received model, not w.
        ("ditto", 3, 2.0, {}, 0.3, {"own/classifier.w": 1.9}),
        # v = 2, w = 0, alpha = 0.5, eta = 0.1: vbar = 1, v = 2.1, w = 0.3, alpha = 0.5 + 0.1 * 2 * 2.
        ("apfl", 3, 2.0, {"adaptive": True}, 0.3, {"own/classifier.w": 2.1, "alpha": 0.9}),
        ("apfl", 3, 2.0, {"adaptive": False}, 0.3, {"own/classifier.w": 2.1, "alpha": 0.5}),
        # An exact inner solution: lambda = 15 gives theta = 1 / 16, then w = 0.005 * 15 / 16.
        ("pfedme", 1, 0.0, {"inner_steps": 400} | RATE, 0.0046875, {"own/classifier.w": 0.0625}),
        # w = 0, a = b = 0.1.
        ("perfedavg", 1, 0.0, {"inner_lr": 0.1, "gradient": "first_order"}, 0.09, {}),
        ("perfedavg", 1, 0.0, {"inner_lr": 0.1, "gradient": "hessian_free"}, 0.081, {}),
        ("perfedavg", 1, 0.0, {"inner_lr": 0.1, "gradient": "exact"}, 0.081, {}),
    ],
)
def test_a_step_by_hand(name, target, start, changes, sent, state):
    """f = (w - target)^2 / 2."""
    (update,) = scalar_client(name, target, start=start, **changes).update([build_broadcast(model=0.0)], 1)
    assert float(update.tensors["model/classifier.w"]) == pytest.approx(sent, abs=1e-12 if state else 1e-10)
    for key, value in state.items():
        assert float(update.client_state[key]) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "changes", "local"),
    [("fedavg_ft", {}, {}), ("ditto", {"pull_weight": 0.5}, {}), ("apfl", {}, {"clip_norm": 0.5}),
     slow("ditto", {"pull_weight": 0.0}, {}), slow("ditto", {"pull_weight": 10.0}, {}), slow("apfl", {}, {"clip_norm": None}),
     *(slow("apfl", FIXED_ALPHA | {"alpha": alpha}, {"clip_norm": norm}) for alpha in (0.0, 0.75) for norm in (None, 0.5))],
)  # fmt: skip
def test_w_is_fedavgs_bit_for_bit(name, changes, local):
    run, plain = digits_left(name, local=local, **changes), digits_left("fedavg", local=local)
    assert all(same(one, other) for one, other in zip(run.models, plain.models, strict=True))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("apfl", {}, lambda w: pytest.approx((2.0 + w) / 2)),  # its first mixture
        ("ditto", {}, lambda w: 2.0),  # the initial model
        ("pfedme", RATE, lambda w: w),  # what it received
    ],
)
def test_a_client_never_seen_is_evaluated(name, changes, expected):
    run = scalar_left(name, [[0, 1]] * 2, **changes)
    assert run.w[-1] != 2.0
    assert run.evaluate_client(2) == expected(run.w[-1])


@pytest.mark.parametrize(("name", "changes"), [("local", {}), ("fedper", {}), ("fedrep", {"head_epochs": 2})])
def test_with_everything_in_the_head_it_is_local(name, changes):
    """FedRep's two head epochs of one step equal Local's two steps, and its body phase has nothing to train."""
    memory = golden_memory(name, [[0, 1, 2]] * 3, **changes)
    assert [float(memory[client]["personal/classifier.w"][0]) for client in range(3)] == pytest.approx(LOCAL, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "models"),
    [
        *(("fedvarp", {"server_lr": rate}, [rate, 4.5 * rate, 4.5 * rate, 7.5 * rate]) for rate in (1.0, 0.5)),  # v = 1, 3.5, 3
        # Steps 0.5, 2, 2.5. An empty round moves by the mean as well.
        *(("mifa", {"server_lr": rate}, [0.5 * rate, 2.5 * rate, 4.5 * rate, 7 * rate]) for rate in (1.0, 0.5)),
        # beta 1/2: v = 1, 3 + 0.25, (2 - 0.5) + 0.5 (1 + 3) / 2.
        ("fedstale", {"stale_weight": 0.5}, [1, 4.25, 4.25, 6.75]),
    ],
)
def test_two_clients_by_hand(name, changes, models):
    """S = {1}, {2}, {1} with Delta = 1, 3, 2, and a round without replies."""
    assert path(rule_of(name, (4, 4), **changes), [{0: 1}, {1: 3}, None, {0: 2}])[0] == pytest.approx(models, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("fedproto", {}, 3.0), ("fedproto", {"prototype_weights": "plain"}, 3.0),
        ("fedproto", {"prototype_weights": "class_count"}, 2.0), ("fedproc", {}, 2.0), ("fedpac", {}, 2.0),
        ("mpfedcon", {}, 2.0), ("mpfedcon", {"centre_weights": "class_count"}, 2.0),
        ("mpfedcon", {"centre_weights": "plain"}, 3.0), ("mpfedcon", {"centre_weights": "data"}, 3.4),
    ],
)  # fmt: skip
def test_holders_of_a_class_weigh_as_their_setting_says(name, weights, expected):
    """Prototypes 1 and 5 of 3 and 1 examples, on clients of 4 and 6: (3 + 5) / 4, (1 + 5) / 2 or (4 + 6 * 5) / 10."""
    rule = rule_of(name, (4, 6), {"proto/mean": (1, 1), "proto/valid": (1,), "head/classifier.w": (1,)}, **weights)
    own = {
        "model/w": torch.zeros(1), "head/classifier.w": torch.zeros(1), "stat/h": torch.zeros(1, 1), "stat/v": torch.ones(()),
    }  # fmt: skip
    replies = [
        Reply(k, own | {"proto/mean": torch.tensor([[mean]]), "proto/count": torch.tensor([count])}, size, {})
        for k, (mean, count, size) in enumerate([(1.0, 3.0, 4), (5.0, 1.0, 6)])
    ]
    rule.aggregate({"w": torch.zeros(1)}, Replies(replies))
    assert rule.broadcast({"w": torch.zeros(1)})["proto/mean"].item() == pytest.approx(expected)
