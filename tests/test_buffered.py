"""schedule=buffered: the order of arrivals, aggregations by hand, and what a checkpoint holds."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import close, config_of, digits_run, read_rows, run_scalar, same, slow
from stopped import SMALL_RUN, equal, outcome, stop_in

from contrafed.core.errors import UserError
from contrafed.data.clock import Clock, Speeds
from contrafed.runs.run import run
from contrafed.server.replies import Reply
from contrafed.server.round_log import Round
from contrafed.server.schedule.buffered import BufferedTime, Config
from contrafed.strategies.fedavg import FedAvg

DEFAULTS = {"staleness": "polynomial", "staleness_a": 1, "staleness_b": 1, "mixes": "updates"}
BUFFERED = ("tracker=none", "clock=lognormal", "schedule=buffered", "schedule.buffer_size=2", "schedule.concurrency=4")


def make(buffer_size, concurrency, times=(1,), strategy=None, **changes):
    """Return the time of a run whose client k takes ``times[k]`` seconds in every round."""

    class Given(Clock):
        def speeds(self, clients, server_round):
            return Speeds(np.array(times, dtype=float)[clients], *np.full((2, len(clients)), np.inf))

    nothing = SimpleNamespace(buffers=frozenset({"mean"}), broadcast_spec={}, upload_spec={})
    pattern = SimpleNamespace(config=SimpleNamespace(late="drop"), draw_seed=0)
    return BufferedTime(Config(buffer_size, concurrency, **DEFAULTS | changes), Given(None, 0, 0), strategy or nothing, pattern)


def rule_of(*about, **changes):
    """Return FedAvg's strategy with such a time. A client takes its seconds whatever its number of steps."""

    class BufferedAvg(FedAvg):
        linear_in_updates = True

        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named)
            self.time, self.num_local_steps = make(*about, strategy=self, **changes), lambda examples: 1

    return BufferedAvg


def events(time, server_round, cohort):
    """Return who starts and who arrives in a round, and its seconds."""
    done = Round(server_round, time.leave_out_busy(np.array(cohort, dtype=np.int64)))
    started = time.plan(done, dict.fromkeys(cohort, 1))
    return list(started), [each.client for each in time.arrived], done.simulated["simulated_seconds"]


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [("constant", [1, 1, 1, 1]), ("polynomial", [1, 1 / 2, 1 / 3, 1 / 4]), ("hinge", [1, 1, 1 / 2, 1 / 3])],
)
def test_staleness_weights(staleness, expected):
    assert [make(1, 1, staleness=staleness).config.weight(late) for late in range(4)] == pytest.approx(expected)


def test_events_by_hand():
    time = make(2, 3, [1, 2, 5])
    assert events(time, 1, [0, 1, 2]) == ([0, 1, 2], [0, 1], 2)
    assert events(time, 2, [0, 1, 2]) == ([0, 1], [0, 1], 2)  # 2 trains on
    assert events(time, 3, [0, 1, 2]) == ([0, 1], [0, 2], 1)  # after 5 seconds, with 0, whose id is smaller
    assert [(each.client, each.arrives) for each in time.training] == [(1, 1)]
    assert events(time, 4, []) == ([], [1], 1)  # without clients that could start, the buffer stays short
    assert events(time, 5, []) == ([], [], 0)


def test_a_free_place_is_taken_within_the_round_but_by_no_client_twice():
    time = make(4, 2, [1] * 3)
    started, arrived, seconds = events(time, 1, range(3))
    assert (started, sorted(arrived), seconds) == ([0, 1, 2], [0, 1, 2], 2)
    assert events(time, 2, range(3))[0] == [0, 1, 2]


def test_an_aggregation_by_hand():
    """K = 2, M = 3. A client's update is 0.19 (a - w) with targets a = 0, 6, 3. Client 2 arrives in round 3 with weight 1/3."""
    found = run_scalar("fedavg", [range(3)] * 3, rule=rule_of(2, 3, [1, 2, 5]), weights="uniform")
    first = 2 + 0.19 * (3 - 2)
    second = first + 0.19 * (3 - first)
    third = second + 0.19 / 2 * ((0 - second) + (3 - 2) / 3)
    assert found == pytest.approx([first, second, third])


def test_clients_upload_what_arrives_and_what_is_in_training():
    """Of three clients that train at once two arrive in a round. At the end one is in training."""
    seen = []
    rule = rule_of(2, 3, [1, 2, 5])
    _, strategy = digits_run("fedavg", 5, clients=3, rule=rule, after_round=seen.append, dtype=torch.float32)
    down, up = (sum(done.client_metrics[name][1].sum() for done in seen[1:]) for name in ("bytes_down", "bytes_up"))
    assert down == sum(done.bytes_down for done in seen)
    assert up == sum(done.bytes_up for done in seen) + strategy.time.bytes_up
    assert len(strategy.time.training) == 1


def test_fedasync_by_hand():
    """K = 1, M = 2. The model is mixed with alpha = 1/2 times s. Client 1 trained w = 2.76 and arrives with s = 1/3."""
    rule = rule_of(1, 2, [1, 2.5], mixes="models")
    found = run_scalar("fedavg", [range(2)] * 3, targets=(0, 6), rule=rule, server_lr=0.5)
    first = 2 - 0.19 / 2 * 2
    second = first - 0.19 / 2 * first
    assert found == pytest.approx([first, second, second + (2.76 - second) / 6])


@pytest.mark.parametrize(
    ("cohorts", "buffer_size", "times"),
    [([[0, 2, 5], [1, 2, 7], [3, 4, 6]], 3, [2.0] * 8), ([range(8), [1, 5], []], 8, [3, 1, 4, 1, 5, 9, 2, 6])],
)
def test_a_buffer_of_the_whole_cohort_is_synchronous_training(cohorts, buffer_size, times):
    plain, _ = digits_run("fedavg", schedule=cohorts)
    ours, strategy = digits_run("fedavg", schedule=cohorts, rule=rule_of(buffer_size, buffer_size, times))
    assert all(same(a, b) for a, b in zip(plain, ours, strict=True))
    assert strategy.time.training == []


@pytest.mark.parametrize("name", [slow("fedavg"), "fedper", slow("moon")])
def test_clients_that_start_from_one_model_train_as_a_stack(name):
    times = [3, 1, 4, 1, 5, 9, 2, 6]
    alone, stacked = (digits_run(name, 3, stack_size=size, rule=rule_of(3, 5, times))[0] for size in (1, 5))
    for ours, theirs in zip(alone, stacked, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("mixes", ["updates", "models"])
@pytest.mark.parametrize("upload", ["model", "delta"])
def test_a_stale_reply_is_an_update_of_the_present_model(mixes, upload):
    """A client got w = 1 and trained w = 4. Now the model is w = 2. Its statistics and prototypes stay as they are."""
    time, one = make(1, 1, mixes=mixes), torch.ones(1)
    tensors = {f"{upload}/w": (4 if upload == "model" else 3) * one, f"{upload}/mean": 9 * one, "proto/mean": 7 * one}
    received = {"model/w": one, "model/mean": 0 * one}
    kept = time._reduce(Reply(0, tensors, 1, {}, received))
    assert not kept.received
    found = time._renew(kept, {"model/w": 2 * one, "model/mean": one}, 0.5)
    assert float(found.get_tensors("delta")["w"]) == (1.5 if mixes == "updates" else 1)
    assert float(found.get_tensors("model")["mean"]) == 9
    assert float(found.tensors["proto/mean"]) == 7


def test_a_client_that_fails_is_dropped_when_it_would_arrive():
    from contrafed.clients.fedavg import FedAvgClient

    class Failing(FedAvgClient):
        def local_update(self, stack):
            if stack.clients == [2]:
                raise RuntimeError("no")
            return super().local_update(stack)

    rule = rule_of(2, 3, [1, 2, 5])
    _, strategy = digits_run("fedavg", clients=3, client_class=Failing, may_fail=True, rule=rule)
    assert strategy.round.simulated["arrived"] == 2
    assert strategy.round.simulated["dropped"] == 1
    assert strategy.round.metrics["staleness_max"] == 2


@pytest.mark.parametrize("method", ["fedper", slow("fedcrl")])
def test_a_resumed_run_has_the_clients_in_training(tmp_path, monkeypatch, method):
    small = (f"strategy={method}", *SMALL_RUN, *BUFFERED, "participation.mean_probability=0.9", "num_rounds=5")
    run(config_of(*small, f"output_dir={tmp_path / 'whole'}"))
    again = (*small, "checkpoint_every=2", f"output_dir={tmp_path / 'run'}")
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped here"):
        stop_in(4, patch)
        run(config_of(*again))
    run(config_of(*again, "resume=latest"))
    assert equal(outcome(tmp_path / "whole"), outcome(tmp_path / "run"))
    # It started in round 1, before the checkpoint of round 2.
    assert b"4,global,fit,staleness_max,3" in outcome(tmp_path / "run")[1]


def test_work_of_clients_in_training_after_the_last_round_is_lost(tmp_path):
    time, done = make(2, 6, [1, 2, 3, 4, 5, 6]), Round(1, np.arange(6))
    time.plan(done, {client: client + 10 for client in range(6)})
    assert (done.simulated["lost_steps"], done.simulated["lost_seconds"]) == (0, 0)
    time.lose_busy(done)  # the clients 0 and 1 have arrived
    assert (done.simulated["lost_steps"], done.simulated["lost_seconds"]) == (
        12 + 13 + 14 + 15,
        3 * 12 + 4 * 13 + 5 * 14 + 6 * 15,
    )
    run(
        config_of(
            "strategy=fedavg",
            *SMALL_RUN,
            *BUFFERED,
            "participation.mean_probability=0.9",
            "num_rounds=1",
            f"output_dir={tmp_path}",
        )
    )
    lost = [float(r["value"]) for r in read_rows(tmp_path / "metrics.csv") if r["metric"] == "lost_seconds"]
    assert json.loads((tmp_path / "summary.json").read_text())["lost_seconds"] == lost[-1] > 0


def test_a_checkpoint_with_another_layout_of_the_clients_in_training_is_refused(tmp_path, monkeypatch):
    small = (
        "strategy=fedavg",
        *SMALL_RUN,
        *BUFFERED,
        "participation.mean_probability=0.9",
        "checkpoint_every=1",
        f"output_dir={tmp_path}",
    )
    with monkeypatch.context() as patch:
        patch.setattr(BufferedTime, "state", lambda self: {"now": self.now, "training": [{"client": 0, "reply": None}]})
        run(config_of(*small, "num_rounds=3"))
    with pytest.raises(UserError, match=r"^resume: "):
        run(config_of(*small, "num_rounds=3", f"resume={max((tmp_path / 'checkpoints').glob('*[0-9]'))}"))
