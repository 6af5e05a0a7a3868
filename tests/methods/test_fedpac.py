"""FedPAC: mixtures and statistics by hand, the minimum over the simplex, heads, and the first round."""

from functools import cache

import numpy as np
import pytest
import torch
from rig import close, config_of, digits_run, workspace_of
from scipy.optimize import minimize

from clients.training.one_round import _opened
from strategies.base import Replies, Reply
from strategies.fedpac import Config, FedPAC
from strategies.simplex import simplex_minimum

ROUNDS = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5]]
SHORT = {"epochs": 1}


def shares(h, v, cut=0.001):
    """Every node's mixture from statistics h (m, ...) and v (m,)."""
    rule = FedPAC.__new__(FedPAC)
    rule.config = Config(cut=cut)
    pairs = zip(torch.tensor(h, dtype=torch.float64), torch.tensor(v, dtype=torch.float64), strict=True)
    return rule.mixtures(Replies(Reply(k, {"stat/h": a, "stat/v": b}, 1, {}) for k, (a, b) in enumerate(pairs)))


def test_mixtures_by_hand():
    """V = (1, 1), |h_1 - h_2|^2 = 4: (5/6, 1/6) and (1/6, 5/6); equal statistics: uniform; one node: its own head."""
    first, second = shares([[[0.0, 0.0]], [[2.0, 0.0]]], [1.0, 1.0])
    np.testing.assert_allclose(first, [5 / 6, 1 / 6], atol=1e-8)
    np.testing.assert_allclose(second, [1 / 6, 5 / 6], atol=1e-8)
    for share in shares([[[1.0, 2.0]]] * 3, [0.5] * 3):
        np.testing.assert_allclose(share, [1 / 3] * 3, atol=1e-8)
    assert shares([[[1.0]]], [0.2])[0].tolist() == [1.0]


def test_a_duplicate_shares_its_weight_and_small_shares_are_cut():
    one, other = shares([[[0.0]], [[2.0]]], [1.0, 1.0])[0]
    twice = shares([[[0.0]], [[2.0]], [[2.0]]], [1.0, 2.0, 2.0])[0]  # two nodes of twice the variance are one of the first
    np.testing.assert_allclose(twice[1], twice[2], atol=1e-8)
    assert other > 0.01
    far = shares([[[0.0]], [[60.0]]], [1.0, 1.0])[0]  # 1/3602 < 0.001
    assert far.tolist() == [1.0, 0.0]
    kept = shares([[[0.0]], [[60.0]]], [1.0, 1.0], cut=0.0)[0]
    assert kept[1] == pytest.approx(1 / 3602, rel=1e-4)
    assert shares([[[1.0]]] * 3, [0.5] * 3, cut=0.4) == [None] * 3  # a third each, so that nothing is left


def test_the_simplex_minimum_is_that_of_a_general_solver():
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, 8):
        factor = rng.normal(size=(size, size + 1))
        matrix = factor @ factor.T + 0.01 * np.eye(size)
        found = simplex_minimum(matrix)
        assert found.min() >= 0
        assert found.sum() == pytest.approx(1, abs=1e-12)
        rule = {"type": "eq", "fun": lambda a: a.sum() - 1}
        options = {"ftol": 1e-14, "maxiter": 500}
        start, bounds = np.full(size, 1 / size), [(0, 1)] * size
        other = minimize(lambda a, m=matrix: a @ m @ a, start, bounds=bounds, constraints=[rule], options=options)
        assert found @ matrix @ found <= other.fun * (1 + 1e-9)


def test_a_mixture_without_its_own_head_is_found():
    """SciPy before 1.16 leaves node 0 out instead, at an objective of 0.0032."""
    h, v = [1.932564586512591, 2.028442932647297, 1.8196094584315552], [3.76920e-4, 2.72945e-4, 2.960968e-3]
    away = np.array(h) - h[2]
    found = simplex_minimum(np.diag(v) + np.outer(away, away))
    assert found == pytest.approx([0.1839, 0, 0.8161], abs=1e-4)


def test_a_solver_that_gives_up_leaves_the_node_its_own_head(monkeypatch):
    def gives_up(matrix, target):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("strategies.simplex.nnls", gives_up)
    assert simplex_minimum(np.eye(3)) is None


def test_a_matrix_that_says_nothing_has_no_minimum():
    assert simplex_minimum(np.zeros((2, 2))) is None
    assert simplex_minimum(np.array([[np.nan, 0], [0, 1]])) is None
    assert simplex_minimum(-np.eye(2)) is None
    assert shares([[[1.0]], [[1.0]]], [0.0, 0.0]) == [None, None]


@cache
def node():
    """A client of one node, and what it receives in a first round."""
    config = config_of("strategy=fedpac", "num_nodes=8", "model=mlp", "dataset.merge_splits=true")
    workspace = workspace_of(config, dtype=torch.float64)
    client = workspace.client_class(workspace, [0])
    down, _ = client.messages(client.model, client.config)
    start = {f"model/{n}": v for n, v in workspace.initial.items()}
    return client, {n: start.get(n, torch.zeros(s, dtype=torch.float64)).detach() for n, s in down.items()}


def test_statistics_by_hand():
    """Features {1, 3} of one class and {2, 2} of another: p = 1/2, h = (1, 1), v = (6/... ) / n = 0.625."""
    client, received = node()
    _, stack = _opened(client, [received], 1, [{f"personal/{n}": client.workspace.initial[n] for n in HEAD}])
    values, labels = torch.tensor([1.0, 3.0, 2.0, 2.0], dtype=torch.float64), torch.tensor([0, 0, 1, 1])

    class Fixed(type(client)):
        def over_examples(self, stack, function, params, constants, examples=None):
            member = torch.nn.functional.one_hot(labels, self.model.num_classes).to(values)
            z = values.unsqueeze(1)
            sums = {"z": member.T @ z, "count": member.sum(0), "square": member.T @ z.square().sum(1)}
            return {name: value.unsqueeze(0) for name, value in sums.items()}

    means, found = Fixed(client.workspace, [0])._statistics(stack)
    assert means[0, :2, 0].tolist() == [2.0, 2.0]
    assert found["stat/h"][0, :2, 0].tolist() == [1.0, 1.0]
    # (1/2 * 5 + 1/2 * 4 - 1/4 * 4 - 1/4 * 4) / 4
    assert found["stat/v"].tolist() == [0.625]


HEAD = ("classifier.weight", "classifier.bias")


def test_the_mixed_head_is_taken_where_there_is_one_and_judged():
    client, received = node()
    mixed = {f"head/{n}": torch.full_like(client.workspace.initial[n], 0.25) for n in HEAD}
    (own,) = client.judge([received], 1)
    assert torch.equal(own.model["classifier.weight"], client.workspace.initial["classifier.weight"])
    (given,) = client.judge([received | mixed | {"head/valid": torch.ones(())}], 1)
    assert torch.equal(given.model["classifier.weight"], mixed["head/classifier.weight"])
    assert set(given.metrics) == {"loss", "accuracy", "trained/loss", "trained/accuracy"}
    (after,) = client.judge([received | mixed | {"head/valid": torch.ones(())}], 1, post_train=True)
    assert after.metrics["accuracy"] == after.metrics["trained/accuracy"]
    assert not torch.equal(after.model["classifier.weight"], mixed["head/classifier.weight"])  # it was trained on


def test_stacked_equals_alone_and_heads_stay_where_a_node_is_away():
    alone, rule = digits_run("fedpac", schedule=ROUNDS, num_rounds=4, local=SHORT)
    stacked, other = digits_run("fedpac", schedule=ROUNDS, num_rounds=4, local=SHORT, stack_size=4)
    close(alone[-1], stacked[-1])
    assert set(rule.state["heads"]) == {0, 1, 2, 3, 4, 5}
    for k, head in rule.state["heads"].items():
        close(head, other.state["heads"][k], tolerance=1e-6)  # mixtures are the root of a least-squares problem
    earlier, three = digits_run("fedpac", schedule=ROUNDS[:1], num_rounds=1, local=SHORT)
    close(three.state["heads"][3], rule.state["heads"][3])


def test_the_first_round_is_cross_entropy_alone():
    plain, _ = digits_run("fedpac", schedule=ROUNDS[:1], num_rounds=1, local=SHORT, align_weight=0.0)
    aligned, _ = digits_run("fedpac", schedule=ROUNDS[:1], num_rounds=1, local=SHORT)
    close(plain[-1], aligned[-1], tolerance=1e-12)
    second, _ = digits_run("fedpac", schedule=ROUNDS[:2], num_rounds=2, local=SHORT)
    without, _ = digits_run("fedpac", schedule=ROUNDS[:2], num_rounds=2, local=SHORT, align_weight=0.0)
    assert any((second[-1][n] - without[-1][n]).abs().max() > 1e-6 for n in second[-1])
