"""Ditto: Local without the pull, and a clipped run. test_by_hand.py has the golden values."""

import pytest
from helpers import slow
from left import digits_left
from recording import settings_of, write_problem
from test_every import outcome, same_outcome

from contrafed.runs.run import run


def test_without_the_pull_v_trains_alone_in_batches_of_its_own():
    """One batch a round holds all of a client's examples in another order, so the sums differ by rounding."""
    local = {"batch_size": 10**6, "epochs": 3}
    run, alone = digits_left("ditto", pull_weight=0.0, local=local), digits_left("local", local=local)
    for client in alone.client_state:
        for name, value in alone.own(client, "personal").items():
            assert run.own(client)[name] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("name", ["ditto", slow("apfl"), slow("fedamp")])
def test_a_clipped_run_goes_on_bit_for_bit(name, tmp_path):
    """A norm is summed tensor by tensor, in the model's order, not in that of a checkpoint's client state."""
    config = settings_of(name, write_problem(tmp_path), clip_norm=0.05) | {"checkpoint_every": 2}
    run(config | {"output_dir": f"{tmp_path}/whole"})
    run(config | {"resume": f"{tmp_path}/whole/checkpoints/000002", "output_dir": f"{tmp_path}/later"})
    same_outcome(outcome(f"{tmp_path}/later"), outcome(f"{tmp_path}/whole"))
