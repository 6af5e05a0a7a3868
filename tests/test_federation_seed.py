"""``federation_seed``: one federation for several seeds."""

import json

import pytest
from helpers import checked_jobs, config_of, read_rows
from tiny import HALF_AVAILABLE, TINY_RUN, run_tiny

from contrafed.config.run_config import resolve
from contrafed.core.client_run import ClientRun
from contrafed.data.federation import load_federation
from contrafed.data.participation import make_participation
from contrafed.runs import checkpoint

PATTERNS = ("bernoulli", "markovian", "cyclic")


def draw_federation(pattern, *overrides):
    """Return the partition, the rates, the availability and the selection of a run."""
    run = resolve(
        config_of(*TINY_RUN, f"participation={pattern}", "participation.select=4", "participation.loss_rate=0.5", *overrides)
    )
    federation = load_federation(run.client)
    shares = federation.partition.class_proportions
    drawn = make_participation(run.participation, shares, run.num_trained, run.seed_of_federation, run.seed)
    available = [drawn.available(t).tolist() for t in range(1, 30)]
    return {
        "partition": [federation.partition.train(client).tolist() for client in range(6)],
        "test": [federation.partition.test(client).tolist() for client in range(6)],
        "rates": drawn.probabilities.tolist(),
        "available": available,
        "lost": [drawn.loses(t, client) for t in range(1, 30) for client in range(6)],
    }


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_federation_is_that_of_its_seed(pattern):
    one = draw_federation(pattern, "seed=1")
    assert draw_federation(pattern, "seed=1", "federation_seed=1") == one
    mixed, zero = draw_federation(pattern, "seed=0", "federation_seed=1"), draw_federation(pattern, "seed=0")
    for part in ("partition", "test", "rates", "available"):
        assert mixed[part] == one[part] != zero[part]
    assert mixed["lost"] == zero["lost"] != one["lost"]  # the server's draws are the run's


def test_a_run_repeats_the_training_alone(tmp_path):
    def read_participants(name):
        return [row["client"] for row in read_rows(tmp_path / name / "participants.csv")]

    common = ("engine=local", "tracker=none", "strategy=fedavg")
    one = run_tiny(tmp_path / "one", "seed=1", *common)
    same = run_tiny(tmp_path / "same", "seed=1", "federation_seed=1", *common)
    other = run_tiny(tmp_path / "other", "seed=0", "federation_seed=1", *common)
    assert one[2:] == same[2:]
    assert other[2] != one[2]
    assert read_participants("one") == read_participants("other")
    assert [each[0]["federation_seed"] for each in (one, same, other)] == [1, 1, 1]
    assert json.loads((tmp_path / "other" / "summary.json").read_text())["seed"] == 0


def test_clients_are_told_the_federation_s_seed_only_if_it_is_another():
    run = resolve(config_of(*TINY_RUN, "seed=3", "federation_seed=5"))
    again = ClientRun.from_json(run.client.to_json())
    assert (again.seed, again.seed_of_federation) == (3, 5)
    plain = resolve(config_of(*TINY_RUN, "seed=3")).client
    assert "federation_seed" not in plain.to_json()
    assert ClientRun.from_json(plain.to_json()).seed_of_federation == 3


def test_another_federation_is_another_job_and_no_checkpoint_for_it(tmp_path, expect_error):
    plain, one = config_of(*HALF_AVAILABLE), config_of(*HALF_AVAILABLE, "federation_seed=1")
    assert checkpoint.identity(plain) != checkpoint.identity(one)
    older = {key: value for key, value in plain.items() if key != "federation_seed"}
    assert checkpoint.identity(older) == checkpoint.identity(plain)
    checkpoint.check_same(tmp_path, older, plain)
    with expect_error("resume"):
        checkpoint.check_same(tmp_path, plain, one)


@pytest.mark.slow
def test_figure_12_repeats_pmfl_on_one_federation():
    jobs = checked_jobs("experiment=pmfl/figure12")
    assert len(jobs) == 60
    assert {run.federation_seed for run in jobs} == {0}
    assert {run.seed for run in jobs} == set(range(10))
    assert {run.client.strategy.name for run in jobs} == {"pmfl"}
