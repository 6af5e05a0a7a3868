"""Common parts of strategies: both kinds of replies, a broadcast per client, scores by model, and the queried clients."""

from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from helpers import (
    Scalar,
    Schedule,
    Through,
    close,
    config_of,
    digits_run,
    read_rows,
    run_strategy,
    same,
    scalar_settings,
    scalar_workspace,
    slow,
    strategy_settings,
)

from contrafed.clients.fedavg import FedAvgClient
from contrafed.config.run_config import server_of
from contrafed.core import codec
from contrafed.engines.worker import identify
from contrafed.runs.run import run
from contrafed.server.base import Population, strategy_class_of
from contrafed.server.replies import Replies, Reply
from contrafed.strategies.fedavg import FedAvg

W = {"model/a": torch.tensor([1.0, 0.1]), "model/b": torch.tensor([[3.0]])}
TRAINED_PARAMS = {"a": torch.tensor([1.3, 0.7]), "b": torch.tensor([[2.0]])}


def test_models_and_deltas_are_answered_whichever_was_sent():
    changed = {name: value - W[f"model/{name}"] for name, value in TRAINED_PARAMS.items()}
    sent_model = Reply(0, {f"model/{n}": v for n, v in TRAINED_PARAMS.items()}, 1, {}, W)
    sent_delta = Reply(1, {f"delta/{n}": v for n, v in changed.items()}, 1, {}, W)
    replies = Replies([sent_delta, sent_model])
    assert all(same(found, changed) for found in replies.deltas())
    assert all(same(found, {n: W[f"model/{n}"] + changed[n] for n in changed}) for found in replies.models()[1:])
    # What was sent is handed on untouched.
    assert replies.models()[0]["a"] is sent_model.tensors["model/a"]
    assert replies.deltas()[1]["a"] is sent_delta.tensors["delta/a"]
    total = replies.weighted_sum("delta", np.array([0.5, 0.5]))
    torch.testing.assert_close(total["b"], torch.tensor([[-1.0]], dtype=torch.float64))
    assert replies.get_tensors("proto") == [{}, {}]


def test_a_change_of_nothing_received_is_no_change():
    reply = Reply(0, {"model/a": torch.ones(1)}, 1, {}, {"cloud/a": torch.ones(1)})
    assert reply.get_tensors("model")["a"] is reply.tensors["model/a"]
    with pytest.raises(ValueError, match="delta/a is not known: the client sends model/a but received no model"):
        reply.get_tensors("delta")
    assert Reply(0, {"proto/mean": torch.ones(1)}, 1, {}).get_tensors("model") == {}  # a method that sends no model


class SendsChanges(FedAvgClient):
    upload = "delta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deltas_are_bit_for_bit_what_clients_would_have_sent(dtype):
    def changes(client_class):
        found = []

        class Rule(FedAvg):
            def aggregate(self, model, replies):
                found.extend(replies.deltas())
                return super().aggregate(model, replies)

        digits_run("fedavg", 1, clients=3, dtype=dtype, client_class=client_class, rule=Rule)
        return found

    made, sent = changes(FedAvgClient), changes(SendsChanges)
    assert len(made) == 3
    assert all(same(a, b) for a, b in zip(made, sent, strict=True))
    assert {value.dtype for value in made[0].values()} == {dtype}


def stub(settings, sizes):
    """Return a strategy for a model of one number w, without clients."""
    rule = server_of(settings)
    client = SimpleNamespace(
        message_spec=lambda model, config: ({"model/w": (1,)}, {}), is_personal=lambda config: False, model_names=("tuned",)
    )
    population = Population(np.array(sizes), np.arange(1000, 1000 + len(sizes)))
    return strategy_class_of(rule)(
        rule.config, client_class=client, client_config=None, model=torch.nn.Module(), population=population,
        participation=Schedule([]), settings="", num_rounds=1, seed=0,
    )  # fmt: skip


class Shifted(FedAvg):
    """Client k starts from W + k + 1, and W + 10 k + 1 is evaluated. Client 0 receives the common model."""

    def per_client_broadcast(self, model, client, evaluating):
        shift = (10 if evaluating else 1) * client + 1
        return {"model/classifier.w": model["classifier.w"] + shift} if client else None

    def aggregate(self, model, replies):
        self.state |= {"models": replies.models(), "deltas": replies.deltas()}
        return {}


def scalar_run(rule, rounds, **changes):
    """Return the models, the strategy, and the messages of each round."""
    settings, sent = scalar_settings(local=changes), []
    how = {"wrap": lambda grid: Through(grid, lambda messages, replies: sent.append(messages) or replies), "rule": rule}
    workspace = scalar_workspace(settings, Scalar(2.0))
    return *run_strategy(workspace, settings, Schedule(rounds), len(rounds), **how), sent


def test_what_a_client_alone_receives_is_what_it_trains_from_and_what_its_change_is_of():
    """Two exact steps of 0.1 from w towards a: a + 0.81 (w - a); a = (0, 6, 3), w = (2, 4, 5)."""
    models, rule, sent = scalar_run(Shifted, [[0, 1, 2]])
    assert [float(m["classifier.w"]) for m in rule.state["models"]] == pytest.approx([1.62, 4.38, 4.62])
    assert [float(d["classifier.w"]) for d in rule.state["deltas"]] == pytest.approx([-0.38, 0.38, -0.38])
    assert float(models[-1]["classifier.w"]) == 2  # what a strategy leaves out does not change
    records = [message.content["arrays"] for message in sent[0]]
    assert [float(codec.from_record(record)["model/classifier.w"]) for record in records] == [2, 4, 5]


def test_what_a_client_alone_receives_reaches_it_in_evaluation_too():
    _, rule, _ = scalar_run(Shifted, [[0]])
    arrays = codec.to_record({"classifier.w": torch.tensor([2.0], dtype=torch.float64)})
    asked = rule.configure_evaluate(2, arrays, ConfigRecord({"clients": [0, 1, 2]}), None)
    found = [codec.from_record(message.content["arrays"])["model/classifier.w"] for message in asked]
    assert [float(value) for value in found] == [2, 13, 23]
    assert asked[0].content["arrays"] is not asked[1].content["arrays"]


@cache
def moon_on_digits(weights):
    return digits_run("moon", 2, clients=5, weights=weights)[0][-1]


@pytest.mark.parametrize("weights", [slow("uniform"), "samples"])
@pytest.mark.parametrize(
    ("rule", "neutral"),
    [
        ("fedau", {}),
        slow("pmfl", {"history_size": 0}),
        slow("pmfl", {"history_size": 0, "normalize": "participants"}),
        slow("pmfl", {"history_size": 0, "normalize": "weights"}),
        ("pmfl", {"history_size": 0, "adaptive_weights": False}),
    ],
)
def test_rules_over_changes_are_fedavg_where_all_take_part_and_clients_are_unequal(rule, neutral, weights):
    models, _ = digits_run("moon", 2, clients=5, server=rule, weights=weights, **neutral)
    close(models[-1], moon_on_digits(weights), 1e-12)


@pytest.mark.parametrize(("weights", "expected"), [("uniform", 11.0), ("samples", 9.5)])
@pytest.mark.parametrize(
    ("rule", "before"),
    [
        ("pmfl", {"rounds_waited": (3, 0), "num_intervals": (0, 3), "mean_interval": (1, 1)}),
        ("fedau", {"mean_interval": (4, 1)}),
    ],
)
def test_weights_by_absence_and_by_samples_multiply(rule, before, weights, expected):
    """n = (1, 3), intervals (4, 1), D = (1, -2). Uniform weights give 10 + (4 - 2)/2."""
    # Weights by samples have shares 1/2 and 3/2 and give 10 + (2 - 3)/2.
    sizes = [1, 3]
    own = {"history_size": 0} if rule == "pmfl" else {}
    server = stub(strategy_settings("moon", server=rule, weights=weights, **own), sizes)
    for name, values in before.items():
        server.state[name][:] = values
    replies = Replies(Reply(k, {"delta/w": torch.tensor([d])}, sizes[k], {}) for k, d in ((0, 1.0), (1, -2.0)))
    assert float(server.aggregate({"w": torch.tensor([10.0])}, replies)["w"]) == expected


@pytest.mark.parametrize("name", ["fedper", slow("fedrep"), slow("lgfedavg")])
def test_rules_over_changes_move_what_travels_and_nothing_else(name):
    reference, _ = digits_run(name, 2, clients=4)
    for server, changes in (("pmfl", {"history_size": 0}), ("fedau", {}), ("pmfl", {})):
        models, rule = digits_run(name, 2, clients=4, server=server, weights="samples", **changes)
        assert 0 < len(rule.shared_names) < len(models[0])
        for n, value in models[-1].items():
            assert torch.equal(value, models[0][n]) == (n not in rule.shared_names), n
        if changes or server == "fedau":
            close(models[-1], reference[-1], 1e-12)


def test_a_rule_chooses_once_a_round_and_knows_the_run():
    asked = []

    class Chooses(FedAvg):
        def select(self, server_round):
            asked.append(server_round)
            return super().select(server_round)[::-1][:2]

    _, rule, sent = scalar_run(Chooses, [[0, 1, 2], [], [1]], lr_decay=0.5)
    assert asked == [1, 2, 3]
    assert [len(messages) for messages in sent] == [2, 0, 1]
    assert rule.round.participants.tolist() == [1]
    assert (rule.seed, rule.num_rounds, rule.population.num_clients) == (0, 3, 3)
    assert [rule.rate(t) for t in (1, 2, 3)] == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize(("idle", "called"), [(False, [2, 1]), (True, [2, 0, 1, 0])])
def test_a_round_without_a_reply_is_an_idle_rules_business(idle, called):
    found = []

    class Counts(FedAvg):
        def aggregate(self, model, replies):
            found.append(len(replies))
            return super().aggregate(model, replies)

    Counts.aggregates_empty_rounds = idle
    models, _, _ = scalar_run(Counts, [[0, 1], [], [2], []])
    assert found == called
    assert [same(one, other) for one, other in pairwise(models)] == [False, True, False, True]


def test_a_rules_own_metrics_are_logged_beside_the_clients():
    class Reports(FedAvg):
        def aggregate(self, model, replies):
            self.round.metrics["step"] = 0.5
            return super().aggregate(model, replies)

    _, rule, _ = scalar_run(Reports, [[0, 1]])
    assert rule.round.metrics["step"] == 0.5
    assert rule.round.metrics["loss"] > 0


@pytest.mark.parametrize(
    ("name", "changes", "personal", "whole"),
    [
        ("fedavg", {}, False, True),
        ("pmfl", {}, False, True),
        ("fedper", {}, True, False),
        ("fedproto", {}, True, False),
        ("fedcrl", {}, True, False),
        ("fedcrl", {"separate": False}, True, True),  # all parts are shared, and every client blends its own model
    ],
)
def test_whether_there_are_personal_models_and_a_global_one(name, changes, personal, whole):
    _, rule = digits_run(name, 1, clients=2, **changes)
    assert (rule.personal, rule.has_global_model) == (personal, whole)


def score_replies(rows, last=1):
    """Return the server's summary of evaluation replies: one dict of metrics per client, or a text for a client that fails."""
    identify()
    rule = stub(strategy_settings("fedavg"), [1] * len(rows))
    asked = rule.configure_evaluate(
        last, codec.to_record({"w": torch.ones(1)}), ConfigRecord({"clients": list(range(len(rows)))}), None
    )
    replies = []
    for i, (message, row) in enumerate(zip(asked, rows, strict=True)):
        message.metadata.__dict__["_message_id"] = str(i)
        replies.append(Message(RecordDict({"metrics": MetricRecord(row)}), reply_to=message))
    rule.aggregate_evaluate(last, reversed(replies))
    return rule.round


def test_other_evaluated_models_are_reported_under_their_names():
    """Accuracies 1/2 and 1 of 1 and 3 examples are 0.875 by examples. The tuned ones, 0 and 1, are 0.75."""
    done = score_replies(
        [
            {"accuracy": 0.5, "loss": 2.0, "num-examples": 1, "tuned/accuracy": 0.0, "tuned/loss": 8.0},
            {"accuracy": 1.0, "loss": 1.0, "num-examples": 3, "tuned/accuracy": 1.0, "tuned/loss": 4.0},
        ]
    )
    assert not done.rejected
    found = done.client_evaluation
    assert (found["accuracy"], found["loss"], found["accuracy_mean"], found["accuracy_std"]) == (0.875, 1.25, 0.75, 0.25)
    assert (found["tuned/accuracy"], found["tuned/loss"], found["tuned/accuracy_mean"]) == (0.75, 5.0, 0.5)
    assert done.client_metrics["accuracy"][1].tolist() == [0.5, 1.0]
    assert done.client_metrics["tuned/accuracy"][1].tolist() == [0.0, 1.0]


def rows_of(folder):
    """Return the accuracies in metrics.csv of the last round, by scope, split and name."""
    rows = [row for row in read_rows(folder / "metrics.csv") if row["round"] == "2" and row["metric"].endswith("accuracy")]
    return {(row["scope"], row["split"], row["metric"]): float(row["value"]) for row in rows}


TINY_RUN = ("engine=local", "num_clients=4", "num_rounds=2", "eval_every=1", "model=mlp", "partition.test_fraction=0.2")


def test_personal_models_are_reported_beside_a_whole_global_one(tmp_path):
    run(config_of("strategy=fedcrl", "strategy.separate=false", *TINY_RUN, f"output_dir={tmp_path}/run"))
    assert {("global", "test", "accuracy"), ("personal", "test", "accuracy")} <= rows_of(tmp_path / "run").keys()


def test_another_evaluated_model_comes_through_a_run(tmp_path, monkeypatch):
    def eval_models(self, stack):
        return {"model": stack.params, "zero": {name: torch.zeros_like(value) for name, value in stack.params.items()}}

    run(config_of("strategy=fedavg", *TINY_RUN, "eval_clients=true", f"output_dir={tmp_path}/plain"))
    monkeypatch.setattr(FedAvgClient, "eval_models", eval_models)
    monkeypatch.setattr(FedAvgClient, "model_names", ("zero",))
    run(config_of("strategy=fedavg", *TINY_RUN, "eval_clients=true", f"output_dir={tmp_path}/both"))
    plain, both = rows_of(tmp_path / "plain"), rows_of(tmp_path / "both")
    assert both | plain == both  # what counts is what it was
    # Scores of zero everywhere: class 0.
    assert 0 <= both["global", "clients", "zero/accuracy"] < both["global", "clients", "accuracy"]


def test_a_model_that_only_some_clients_evaluate_is_averaged_over_these():
    extra = {"tuned/accuracy": 0.5, "tuned/loss": 1.0}
    done = score_replies(
        [{"accuracy": 0.0, "loss": 2.0, "num-examples": 1}, {"accuracy": 1.0, "loss": 0.0, "num-examples": 1} | extra]
    )
    assert (done.client_evaluation["accuracy"], done.client_evaluation["tuned/accuracy"]) == (0.5, 0.5)
    assert done.client_metrics["tuned/accuracy"][0].tolist() == [1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": float("nan")},
        {"tuned/accuracy": 1.0},
        {"tuned/accuracy": 1.0, "tuned/loss": float("inf")},
        {"num-examples": -1},
    ],
)
def test_a_score_that_lacks_a_number_does_not_count(wrong):
    good = {"accuracy": 1.0, "loss": 1.0, "num-examples": 2}
    done = score_replies([good, good | {"accuracy": 0.0} | wrong])
    assert dict(done.rejected) == {"evaluation malformed": 1}
    assert done.client_evaluation["accuracy"] == 1
    assert "tuned/accuracy" not in done.client_evaluation
