"""FedPAC: loss, mixtures and statistics by hand, the minimum over the simplex, heads, and the first round."""

from functools import cache

import numpy as np
import pytest
import torch
from hand import client_of, losses_of, rule_of
from helpers import Vector, build_received, close, config_of, digits_run, strategy_settings, workspace_of
from scipy.optimize import minimize

from contrafed.data.federation import Federation
from contrafed.data.images import ImageData
from contrafed.data.partition import Partition
from contrafed.server.base import Replies, Reply
from contrafed.strategies.fedpac import Config, FedPAC
from contrafed.strategies.simplex import minimize_on_simplex

ROUNDS = [[0, 1, 2, 3], [1, 2, 5], [], [0, 1, 4, 5]]
SHORT_TRAINING = {"epochs": 1}
HEAD = ("classifier.weight", "classifier.bias")


@pytest.mark.parametrize(
    ("valid", "own", "distance"),
    [
        ([1.0, 0.0], [[9.0, 9.0]] * 2, (1 + 4) / 2),  # from the global prototype (0, 1), over D = 2
        ([0.0, 1.0], [[0.0, 0.0], [9.0, 9.0]], (1 + 9) / 2),  # from the client's own mean of the class
        ([0.0, 0.0], [[9.0, 9.0]] * 2, 0),  # no class has a prototype yet
    ],
)
def test_the_loss_by_hand(valid, own, distance):
    """z = (1, 3) of class 0, lambda = 0.3."""
    client = client_of("fedpac", align_weight=0.3)
    losses, _ = losses_of(client, [1.0, 3.0], means=[[0.0, 1.0], [5.0, 5.0]], valid=valid, own=own)
    assert losses["distance"].item() == pytest.approx(distance)
    assert losses["loss"].item() == pytest.approx(losses["task"].item() + 0.3 * distance)


def shares(h, v, cut=0.001):
    """Return every client's mixture from statistics h (m, ...) and v (m,)."""
    rule = FedPAC.__new__(FedPAC)
    rule.config = Config(cut=cut)
    pairs = zip(torch.tensor(h, dtype=torch.float64), torch.tensor(v, dtype=torch.float64), strict=True)
    return rule.mixtures(Replies(Reply(k, {"stat/h": a, "stat/v": b}, 1, {}) for k, (a, b) in enumerate(pairs)))


def test_mixtures_by_hand():
    """V = (1, 1) and |h_1 - h_2|^2 = 4 give (5/6, 1/6) and (1/6, 5/6)."""
    # Equal statistics give a uniform mixture, and one client its own head.
    first, second = shares([[[0.0, 0.0]], [[2.0, 0.0]]], [1.0, 1.0])
    np.testing.assert_allclose(first, [5 / 6, 1 / 6], atol=1e-8)
    np.testing.assert_allclose(second, [1 / 6, 5 / 6], atol=1e-8)
    for share in shares([[[1.0, 2.0]]] * 3, [0.5] * 3):
        np.testing.assert_allclose(share, [1 / 3] * 3, atol=1e-8)
    assert shares([[[1.0]]], [0.2])[0].tolist() == [1.0]


def test_a_negative_variance_of_one_client_costs_the_others_no_mixture():
    """It counts as 0. The matrix of every client would not be positive definite."""
    found = shares([[[0.0]], [[1.0]], [[2.0]]], [1.0, 1.0, -1e6])
    for share, expected in zip(found, shares([[[0.0]], [[1.0]], [[2.0]]], [1.0, 1.0, 0.0]), strict=True):
        np.testing.assert_allclose(share, expected, atol=1e-8)
    assert found[0][1] > 0


def test_a_duplicate_shares_its_weight_and_small_shares_are_cut():
    one, other = shares([[[0.0]], [[2.0]]], [1.0, 1.0])[0]
    twice = shares([[[0.0]], [[2.0]], [[2.0]]], [1.0, 2.0, 2.0])[0]  # two of twice the variance equal the first
    np.testing.assert_allclose(twice[1], twice[2], atol=1e-8)
    assert other > 0.01
    far = shares([[[0.0]], [[60.0]]], [1.0, 1.0])[0]  # 1/3602 < 0.001
    assert far.tolist() == [1.0, 0.0]
    assert shares([[[0.0]], [[60.0]]], [1.0, 1.0], cut=0.0)[0][1] == pytest.approx(1 / 3602, rel=1e-4)
    assert shares([[[1.0]]] * 3, [0.5] * 3, cut=0.4) == [None] * 3  # a third each, so that nothing is left


def test_the_simplex_minimum_is_that_of_a_general_solver():
    rng = np.random.default_rng(0)
    for size in (2, 3, 5, 8):
        factor = rng.normal(size=(size, size + 1))
        matrix = factor @ factor.T + 0.01 * np.eye(size)
        found = minimize_on_simplex(matrix)
        assert found.min() >= 0
        assert found.sum() == pytest.approx(1, abs=1e-12)
        rule = {"type": "eq", "fun": lambda a: a.sum() - 1}
        options = {"ftol": 1e-14, "maxiter": 500}
        start, bounds = np.full(size, 1 / size), [(0, 1)] * size
        other = minimize(lambda a, m=matrix: a @ m @ a, start, bounds=bounds, constraints=[rule], options=options)
        assert found @ matrix @ found <= other.fun * (1 + 1e-9)


def test_a_mixture_without_its_own_head_is_found():
    """SciPy before 1.16 leaves out client 0 instead, at an objective of 0.0032."""
    h, v = [1.932564586512591, 2.028442932647297, 1.8196094584315552], [3.76920e-4, 2.72945e-4, 2.960968e-3]
    away = np.array(h) - h[2]
    assert minimize_on_simplex(np.diag(v) + np.outer(away, away)) == pytest.approx([0.1839, 0, 0.8161], abs=1e-4)


def test_a_solver_that_gives_up_leaves_the_client_its_own_head(monkeypatch):
    def gives_up(matrix, target):
        raise RuntimeError("Maximum number of iterations reached.")

    monkeypatch.setattr("contrafed.strategies.simplex.nnls", gives_up)
    assert minimize_on_simplex(np.eye(3)) is None


def test_a_matrix_that_says_nothing_has_no_minimum():
    assert minimize_on_simplex(np.zeros((2, 2))) is None
    assert minimize_on_simplex(np.array([[np.nan, 0], [0, 1]])) is None
    assert minimize_on_simplex(-np.eye(2)) is None
    assert shares([[[1.0]], [[1.0]]], [0.0, 0.0]) == [None, None]


@cache
def make_client():
    """Return a client and its received tensors of a first round."""
    config = config_of("strategy=fedpac", "num_clients=8", "model=mlp", "dataset.merge_splits=true")
    workspace = workspace_of(config, dtype=torch.float64)
    client = workspace.client_class(workspace, [0])
    down, _ = client.message_spec(client.model, client.config)
    start = {f"model/{n}": v for n, v in workspace.initial.items()}
    return client, {n: start.get(n, torch.zeros(s, dtype=torch.float64)).detach() for n, s in down.items()}


class Pixels(Vector):
    """A model whose representation of an image is its single pixel."""

    def __init__(self):
        super().__init__([0.0, 0.0])
        self.embedding_size = 1

    def forward(self, x, dropout_mask=None, with_levels=False, encoded=False):
        return super().forward(x)._replace(z=x.flatten(1))


def test_statistics_by_hand():
    """Features {1, 3} of one class and {2, 2} of another: p = 1/2, h = (1, 1), E|z|^2 = 5 and 4, and means of 2."""
    x, y = torch.tensor([1, 3, 2, 2], dtype=torch.uint8).view(4, 1, 1, 1), torch.tensor([0, 0, 1, 1])
    data = ImageData(x, y, torch.zeros(4, dtype=torch.bool), (0.0,), (1 / 255,), 2, None)
    federation = Federation(data, Partition([np.arange(4)], [np.arange(0)], y.numpy(), 2))
    settings = config_of("num_clients=1") | {"strategy": strategy_settings("fedpac")}
    workspace = workspace_of(settings, dtype=torch.float64, federation=federation, model=Pixels())
    (update,) = workspace.client_class(workspace, [0]).update([build_received(workspace)], 1)
    assert update.tensors["stat/h"].tolist() == [[1.0], [1.0]]
    # (1/2 * 5 + 1/2 * 4 - 1/4 * 4 - 1/4 * 4) / 4
    assert update.tensors["stat/v"].item() == 0.625


def test_statistics_are_of_the_received_body_and_so_are_the_means_that_stand_in_for_prototypes():
    """Compare with the representations of a client's images, one class at a time."""
    client, received = make_client()
    seen, loss, workspace = [], client.loss, client.workspace

    def record_loss(params, batch, loss_inputs):
        seen.append(loss_inputs["own"])
        return loss(params, batch, loss_inputs)

    client.loss = record_loss
    try:
        (update,) = client.update([received], 1)
    finally:
        del client.loss
    index = torch.from_numpy(workspace.federation.partition.train(0))
    z, y = workspace.model(workspace.images(index)).z.detach(), workspace.y[index]
    h, v = torch.zeros_like(update.tensors["stat/h"]), 0.0
    for c in y.unique().tolist():
        mine = z[y == c]
        p, mean = len(mine) / len(z), mine.mean(0)
        h[c] = p * mean
        v += p * mine.square().sum(1).mean() - p**2 * mean.square().sum()
        torch.testing.assert_close(seen[0][c], mean)
    torch.testing.assert_close(update.tensors["stat/h"], h)
    torch.testing.assert_close(update.tensors["stat/v"], v / len(z))


def test_two_heads_are_mixed_by_hand():
    """Heads 0 and 6 with V = (1, 1) and |h_1 - h_2|^2 = 4 give 6/6 and 5 * 6/6. Absent clients keep their own."""
    down = {"proto/mean": (1, 2), "proto/valid": (1,), "head/classifier.w": (1,), "head/valid": ()}
    rule, model = rule_of("fedpac", (1, 1, 1), down), {"w": torch.zeros(1)}
    table = {"model/w": torch.zeros(1), "proto/mean": torch.zeros(1, 2), "proto/count": torch.ones(1)}

    def build_reply(client, head, h):
        own = {"head/classifier.w": torch.tensor([head]), "stat/h": torch.tensor([[h, 0.0]]), "stat/v": torch.tensor(1.0)}
        return Reply(client, table | own, 1, {})

    rule.aggregate(model, Replies([build_reply(0, 0.0, 0.0), build_reply(2, 6.0, 2.0)]))
    assert rule.broadcast(model)["head/valid"].item() == 0
    assert rule.per_client_broadcast(model, 1, False) is None
    for client, head in ((0, 1.0), (2, 5.0)):
        found = rule.per_client_broadcast(model, client, False)
        assert found["head/classifier.w"].item() == pytest.approx(head, abs=1e-6)
        assert found["head/valid"].item() == 1
    rule.aggregate(model, Replies([build_reply(2, 7.0, 2.0)]))
    assert [rule.per_client_broadcast(model, client, False)["head/classifier.w"].item() for client in (0, 2)] == pytest.approx(
        [1, 7], abs=1e-6
    )


def test_the_mixed_head_is_taken_where_there_is_one_and_evaluated():
    client, received = make_client()
    mixed = {f"head/{n}": torch.full_like(client.workspace.initial[n], 0.25) for n in HEAD}
    (own,) = client.evaluate_clients([received], 1)
    assert torch.equal(own.model["classifier.weight"], client.workspace.initial["classifier.weight"])
    (given,) = client.evaluate_clients([received | mixed | {"head/valid": torch.ones(())}], 1)
    assert torch.equal(given.model["classifier.weight"], mixed["head/classifier.weight"])
    assert set(given.metrics) == {"loss", "accuracy", "trained/loss", "trained/accuracy"}
    (after,) = client.evaluate_clients([received | mixed | {"head/valid": torch.ones(())}], 1, after_training=True)
    assert after.metrics["accuracy"] == after.metrics["trained/accuracy"]
    assert not torch.equal(after.model["classifier.weight"], mixed["head/classifier.weight"])  # it was trained on


def test_the_head_phase_has_a_rate_of_its_own():
    """One client, whose mixture is its own head, without a body phase."""

    def head(rate, head_lr):
        _, rule = digits_run("fedpac", schedule=[[0]], num_rounds=1, local={"epochs": 0, "lr": rate}, head_lr=head_lr)
        return rule.state["heads"][0]["classifier.bias"]

    assert torch.equal(head(0.01, 0.1), head(0.5, 0.1))
    assert not torch.equal(head(0.01, 0.1), head(0.01, 0.2))


def test_the_first_round_is_cross_entropy_alone():
    plain, _ = digits_run("fedpac", schedule=ROUNDS[:1], num_rounds=1, local=SHORT_TRAINING, align_weight=0.0)
    aligned, _ = digits_run("fedpac", schedule=ROUNDS[:1], num_rounds=1, local=SHORT_TRAINING)
    close(plain[-1], aligned[-1], tolerance=1e-12)
    second, _ = digits_run("fedpac", schedule=ROUNDS[:2], num_rounds=2, local=SHORT_TRAINING)
    without, _ = digits_run("fedpac", schedule=ROUNDS[:2], num_rounds=2, local=SHORT_TRAINING, align_weight=0.0)
    assert any((second[-1][n] - without[-1][n]).abs().max() > 1e-6 for n in second[-1])
