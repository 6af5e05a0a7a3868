"""FedExP: lengths of steps by hand, the golden problem, and the mean of two models that is evaluated."""

from pathlib import Path

import pytest
import torch
from hand import path, rule_of
from helpers import close, config_of
from tiny import run_tiny

from contrafed.runs import checkpoint
from contrafed.runs.run import run
from contrafed.server.base import Replies, Reply

PLAIN_TRAINING = {"lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None}


def rate_of(*deltas, sizes=(1, 1, 1), epsilon=0.0, weights="uniform"):
    """Return the server's rate for one update per client, and the distance that the model moves."""
    rule = rule_of("fedexp", sizes, {"model/w": (len(deltas[0]),)}, epsilon=epsilon, weights=weights)
    model = {"w": torch.zeros(len(deltas[0]), dtype=torch.float64)}
    sent = rule.broadcast(model)
    moved = [torch.tensor(delta, dtype=torch.float64) for delta in deltas]
    replies = [Reply(k, {"model/w": delta}, sizes[k], {}, sent) for k, delta in enumerate(moved)]
    new = rule.aggregate(model, Replies(replies))["w"]
    return rule.round.metrics["server_lr"], new.tolist()


def test_the_length_of_the_step_by_hand():
    assert rate_of([1.0, 2.0], [1.0, 2.0]) == (1, [1, 2])  # one opinion
    assert rate_of([1.0, 0.0], [0.0, 1.0]) == (1, [0.5, 0.5])  # 2 / (4 * 0.5)
    rate, moved = rate_of([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0])  # 3 / (6 / 3)
    assert rate == pytest.approx(1.5, rel=1e-12)
    assert moved == pytest.approx([0.5] * 3, rel=1e-12)
    assert rate_of([3.0], [-1.0])[0] == pytest.approx(10 / (4 * 1), rel=1e-12)
    assert rate_of([3.0], [-1.0], epsilon=0.25)[0] == pytest.approx(10 / (4 * 1.25), rel=1e-12)
    assert rate_of([0.0], [0.0]) == (1, [0])


def test_by_samples_every_mean_is_weighted():
    """n = (1, 2), Delta = (3, -1): D = 1/3, sum p |Delta|^2 = 11/3, eta_g = (11/3) / (2/9) = 16.5."""
    rate, moved = rate_of([3.0], [-1.0], sizes=(1, 2), weights="samples")
    assert rate == pytest.approx(16.5, rel=1e-12)
    assert moved == pytest.approx([5.5], rel=1e-12)


def test_the_mean_of_the_last_two_models_is_evaluated():
    """The model is 1 and then 3. A round without replies changes neither it nor the evaluated model."""
    rule = rule_of("fedexp")
    models, _ = path(rule, [1.0, 2.0])
    now = {"w": torch.tensor([models[-1]])}
    assert models == [1, 3]
    assert rule.eval_model(now)["w"].tolist() == [2]
    assert rule.broadcast_for_evaluation(now)["model/w"].tolist() == [2]
    assert rule.broadcast(now)["model/w"].tolist() == [3]
    path(rule, [None], start=3.0)
    assert rule.eval_model(now)["w"].tolist() == [2]
    assert rule_of("fedexp").eval_model(now)["w"].tolist() == [3]  # before the first step


def test_a_run_leaves_what_was_evaluated_and_scores_it_again(tmp_path):
    _, left, metrics, _ = run_tiny(tmp_path / "run", "strategy=fedexp", "engine=local", "checkpoint_every=1")
    model, state = checkpoint.find(f"{tmp_path}/run").server()
    close(left, {name: (value + state["last"][name]) / 2 for name, value in model.items()}, 1e-7)
    assert not torch.equal(left["classifier.bias"], model["classifier.bias"])
    again = run(config_of(f"evaluate_only={tmp_path}/run", "engine=local", f"output_dir={tmp_path}/again"))
    rows = (Path(again["folder"]) / "metrics.csv").read_text().splitlines()
    scored = [row.split(",")[1:] for row in rows if row.startswith("0,global,test,")]
    assert scored == [row.split(",")[1:] for row in metrics.decode().splitlines() if row.startswith("3,global,test,")] != []
