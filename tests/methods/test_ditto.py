"""Ditto: the golden problem, and Local without the pull."""

import pytest
from left import FULL_COHORTS, PATTERN, digits_left, scalar_left
from recording import settings_of, write_problem
from test_every import outcome, same_outcome

from contrafed.runs.run import run


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize(
    ("pull", "rounds", "last", "own"),
    [
        (1.0, FULL_COHORTS[:3], 2.468559, [1.345934, 3.559502, 2.452718]),
        (0.75, FULL_COHORTS[:3], 2.468559, [1.282257, 3.629801, 2.456029]),
        (0.0, FULL_COHORTS[:3], 2.468559, [1.062882, 3.874236, 2.468559]),
        (1.0, PATTERN, 2.997660, [1.574102, 3.613747, 2.516628]),
    ],
)
def test_golden_values(pull, rounds, last, own, stack_size):
    run = scalar_left("ditto", rounds, stack_size=stack_size, pull_weight=pull)
    assert run.w[-1] == pytest.approx(last, abs=1e-5)
    assert run.list_state_numbers("own/classifier.w") == pytest.approx(own, abs=1e-5)
    assert [run.evaluate_client(client) for client in range(3)] == run.list_state_numbers("own/classifier.w")


def test_without_the_pull_v_trains_alone_in_batches_of_its_own():
    """One batch a round holds all of a client's examples in another order, so the sums differ by rounding."""
    local = {"batch_size": 10**6, "epochs": 3}
    run, alone = digits_left("ditto", pull_weight=0.0, local=local), digits_left("local", local=local)
    for client in alone.client_state:
        for name, value in alone.own(client, "personal").items():
            assert run.own(client)[name] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["ditto", "apfl", "fedamp"])
def test_a_clipped_run_goes_on_bit_for_bit(name, tmp_path):
    """A norm is summed tensor by tensor, in the model's order, not in that of a checkpoint's client state."""
    config = settings_of(name, write_problem(tmp_path), clip_norm=0.05) | {"checkpoint_every": 2}
    run(config | {"output_dir": f"{tmp_path}/whole"})
    run(config | {"resume": f"{tmp_path}/whole/checkpoints/000002", "output_dir": f"{tmp_path}/later"})
    same_outcome(outcome(f"{tmp_path}/later"), outcome(f"{tmp_path}/whole"))
