"""Clients that join late or leave permanently, and lost replies of clients that have trained."""

import numpy as np
import pytest
from helpers import Scalar, Schedule, config_of, run_strategy, same, scalar_settings, scalar_workspace, slow, workspace_of
from safetensors.torch import load_file
from tiny import TINY_RUN
from wire import SMALL_RUN, Wire, plain, rows_of, run_devices

from contrafed.core.client_run import choose
from contrafed.data.participation import make_participation
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.run import run


def make(name="arrival", num_clients=20, seed=0, **changes):
    chosen = choose("participation", config_of(f"participation={name}")["participation"] | changes)
    return make_participation(chosen, lambda: np.full((num_clients, 4), 0.25), num_clients, seed)


def test_listed_clients_by_hand():
    pattern = make(num_clients=4, joins=[[3, [0, 2]]], leaves=[[2, [1]], [5, [2]]])
    assert [pattern.participants(r).tolist() for r in range(1, 7)] == [[1, 3], [3], [0, 2, 3], [0, 2, 3], [0, 3], [0, 3]]


def test_shares_are_drawn_by_the_seed_from_those_that_can():
    pattern = make(num_clients=20, joins=[[10, 0.4], [20, 0.1], [5, [7]]], leaves=[[15, 0.3], [30, 0.5]])
    here = np.array([pattern.available(r) for r in range(1, 41)])
    assert here.sum(1)[[0, 4, 9, 14, 19, 29]].tolist() == [9, 10, 18, 12, 14, 4]
    assert (np.abs(np.diff(here.astype(int), axis=0)).sum(0) <= 2).all()
    assert here.any(0).all()  # clients that leave were available
    assert not here[:4, 7].any()
    assert here[4, 7]
    assert not np.array_equal(here[0], make(num_clients=20, seed=1, joins=[[10, 0.4], [20, 0.1], [5, [7]]]).available(1))


def test_one_by_one_they_come_and_go():
    pattern = make(num_clients=3, joins=[[2, [1]], [3, [2]]], leaves=[[4, [0]], [5, [1]], [6, [2]]])
    assert [pattern.participants(r).tolist() for r in range(1, 8)] == [[0], [0, 1], [0, 1, 2], [1, 2], [2], [], []]


def there(folder, name, present):
    """Return a trace of the available (client, round)."""
    path = folder / f"{name}.csv"
    path.write_text("client,round,available\n" + "\n".join(f"{k},{r},1" for k, r in sorted(present)) + "\n")
    return "participation=trace", f"participation.path={path}"


def run_arrival(folder, *overrides):
    """Make a tiny real run, and return its model, participants and metrics."""
    summary = run(config_of(*TINY_RUN, "engine=local", *overrides, f"output_dir={folder}"))
    out = folder.__class__(summary["folder"])
    return load_file(out / "model.safetensors"), (out / "participants.csv").read_bytes(), (out / "metrics.csv").read_bytes()


def test_a_run_with_clients_that_come_and_go_is_the_recorded_one(tmp_path):
    own = ("participation=arrival", "participation.joins=[[3,[1]]]", "participation.leaves=[[2,[0]]]")
    present = {(k, r) for r in (1, 2, 3) for k in range(6)} - {(0, 2), (0, 3), (1, 1), (1, 2)}
    arrived = run_arrival(tmp_path / "a", "strategy=pmfl", *own)
    recorded = run_arrival(tmp_path / "b", "strategy=pmfl", *there(tmp_path, "trace", present))
    assert same(arrived[0], recorded[0])
    assert arrived[1:] == recorded[1:]


LOSSY_RUN = ("participation=full", "participation.loss_rate=0.4")


def lost_of(rate, rounds, clients=6, seed=0):
    pattern = make("full", clients, seed, loss_rate=rate)
    return {(k, r) for r in range(1, rounds + 1) for k in range(clients) if pattern.loses(r, k)}


def test_lost_replies_are_a_function_of_seed_round_and_client_at_the_rate_asked_for():
    """20,000 draws at 0.3 are within four standard deviations."""
    # No two rounds, clients or seeds are equal, nor equal to a selection's draw.
    lost = lost_of(0.3, 1000, 20)
    assert len(lost) / 20_000 == pytest.approx(0.3, abs=4 * (0.21 / 20_000) ** 0.5)
    by_round = np.array([[(k, r) in lost for k in range(20)] for r in range(1, 1001)])
    assert np.abs(by_round.mean(0) - 0.3).max() < 4.5 * (0.21 / 1000) ** 0.5
    assert np.abs(np.corrcoef(by_round.T) - np.eye(20)).max() < 0.15
    assert lost_of(0.3, 40, 20) == {pair for pair in lost if pair[1] <= 40}
    assert lost_of(0.3, 40, 20, seed=1) != lost_of(0.3, 40, 20)
    assert lost_of(0.0, 40) == set()
    assert len(lost_of(1.0, 40)) == 240


def test_a_lost_reply_of_a_method_without_memory_is_an_absence_that_is_counted(tmp_path):
    lost = lost_of(0.4, 3)
    assert {r for _, r in lost} == {1, 2, 3}
    model, _, metrics = run_arrival(tmp_path / "a", "strategy=fedavg", *LOSSY_RUN)
    present = {(k, r) for r in (1, 2, 3) for k in range(6)} - lost
    assert same(model, run_arrival(tmp_path / "b", "strategy=fedavg", *there(tmp_path, "trace", present))[0])
    assert rows_of(metrics, "lost") == {r: sum(when == r for _, when in lost) for r in (1, 2, 3)}
    assert rows_of(metrics, "participants") == {1: 6, 2: 6, 3: 6}
    assert not any(rows_of(metrics, "failures").values())
    assert not any(rows_of(metrics, "replies_rejected").values())


@pytest.mark.parametrize("name", ["pmfl", slow("scaffold"), slow("fedppo"), "fedcrl", slow("fedawe"), slow("fedamp")])
def test_when_every_reply_is_lost_the_model_stays_and_the_run_goes_on(tmp_path, name):
    once = run_arrival(tmp_path / "a", f"strategy={name}", "participation=full", "participation.loss_rate=1.0")
    nobody = run_arrival(tmp_path / "b", f"strategy={name}", *there(tmp_path, "nobody", {(0, 9)}))
    assert same(once[0], nobody[0])
    assert rows_of(once[2], "lost") == rows_of(once[2], "participants")


def test_memory_stays_with_a_client_whose_reply_is_lost(tmp_path):
    """PMFL's clients count their rounds of training. Client 1's reply of round 2 is lost, and it counts that round."""
    config = config_of(*TINY_RUN, "strategy=pmfl")
    counted, rounds = [], [[0, 1, 2, 3, 4, 5]] * 3
    for schedule in (Schedule(rounds), Schedule(rounds, {(2, 1)}), Schedule([rounds[0], [0, 2, 3, 4, 5], rounds[0]])):
        grid, lost = LocalGrid(6, 1), []
        how = {"grid": grid, "after_round": lambda done, lost=lost: lost.append(done.lost)}
        run_strategy(workspace_of(config), config, schedule, 3, **how)
        counted.append((int(grid.client_states.get(FIRST_NODE_ID + 1)["participations"]), lost))
    assert counted == [(3, [0, 0, 0, 0]), (3, [0, 0, 1, 0]), (2, [0, 0, 0, 0])]


@pytest.mark.parametrize(("name", "state"), [("scaffold", "control"), ("feddyn", "gradient")])
def test_what_server_and_clients_both_keep_is_apart_by_what_was_lost(name, state):
    """Without losses SCAFFOLD's c and FedDyn's h are the mean of the clients' own. With one, client 1's share is missing."""
    settings = scalar_settings(name)
    for lost in ((), {(1, 1)}):
        grid = LocalGrid(3, 1)
        schedule = Schedule([[0, 1, 2]], lost)
        _, rule = run_strategy(scalar_workspace(settings, Scalar(2.0)), settings, schedule, 1, grid=grid)
        client_states = [grid.client_states.get(FIRST_NODE_ID + k) for k in range(3)]
        own = [float(next(value for key, value in memory.items() if f"{state}/" in key)) for memory in client_states]
        assert own[1] != 0
        counted = [value for k, value in enumerate(own) if not (lost and k == 1)]
        assert float(rule.state[state]["classifier.w"]) == pytest.approx(sum(counted) / 3, abs=1e-12)
        assert rule.round.lost == len(lost)


def test_known_probabilities_count_what_arrives():
    assert make("bernoulli", beta=None, mean_probability=0.5, loss_rate=0.2).probability() == pytest.approx([0.4] * 20)


def test_a_reply_from_a_device_is_lost_alike(tmp_path, quick_devices):
    overrides = ("strategy=fedavg", "participation.loss_rate=0.4")
    model, metrics, *_ = run_devices(tmp_path / "devices", Wire(*plain()), *overrides)
    run(config_of(*SMALL_RUN, *overrides, f"output_dir={tmp_path}/local"))
    assert same(model, load_file(tmp_path / "local" / "model.safetensors"))
    assert metrics == (tmp_path / "local" / "metrics.csv").read_bytes()
    assert sum(rows_of(metrics, "lost").values()) == len(lost_of(0.4, 3, 3)) > 0
