"""Clients that draw fewer than min_client_size examples: refused, filled up or dropped, and reported."""

import numpy as np
import pytest
from helpers import config_of
from test_partitions import data_of, make

from contrafed.data.partition import Small
from contrafed.runs.run import run


def test_small_clients_error_move_and_drop(expect_error):
    tight = {"alpha": 0.05, "min_client_size": 60, "max_redraws": 2}
    with expect_error():
        make("dirichlet", on_small="error", **tight)
    moved = make("dirichlet", on_small="move", **tight)
    assert moved.sizes.min() >= 60
    assert moved.sizes.sum() == 2000
    drawn = make("dirichlet", **(tight | {"min_client_size": 0, "max_redraws": 0})).sizes
    once = make("dirichlet", on_small="move", **(tight | {"max_redraws": 0})).small
    assert (once.clients, once.moved, once.dropped) == ((drawn < 60).sum(), (60 - drawn).clip(0).sum(), 0)
    dropped = make("dirichlet", on_small="drop", **tight)
    assert ((dropped.sizes == 0) | (dropped.sizes >= 60)).all()
    assert (dropped.sizes == 0).any()
    assert (dropped.class_proportions()[dropped.sizes == 0] == 0).all()
    assert dropped.small == Small((dropped.sizes == 0).sum(), 0, 2000 - dropped.sizes.sum())
    assert make("iid").small == Small(0, 0, 0)


def test_moving_is_refused_when_nobody_has_enough(expect_error):
    with expect_error("partition.min_client_size"):
        make("lognormal", mean_size=10, min_client_size=50)
    owner = np.repeat(np.arange(40), 50)
    with expect_error("partition.min_client_size"):
        make("natural", data=data_of(owner=owner), min_client_size=60, on_small="move")


def test_natural_clients_get_nothing_that_others_wrote():
    owner = np.repeat([0, 1, 2], [1997, 2, 1])
    assert sorted(make("natural", clients=3, data=data_of(owner=owner)).sizes.tolist()) == [0, 0, 1997]


@pytest.mark.parametrize(("name", "each"), [("pathological", 2), ("lognormal", 3)])
def test_filled_up_clients_keep_their_class_limit(name, each):
    changes = {"pieces": "random"} if name == "pathological" else {"mean_size": 60, "sigma": 1.0}
    part = make(name, classes_per_client=each, min_client_size=30, max_redraws=0, **changes)
    assert part.sizes.min() >= 30
    assert ((part.class_counts() > 0).sum(1) <= each).all()


def test_dropping_needs_no_examples_for_everyone_but_keeps_someone(expect_error):
    few = make("dirichlet", clients=500, alpha=0.1, min_client_size=5, on_small="drop", max_redraws=1)
    assert ((few.sizes == 0) | (few.sizes >= 5)).all()
    assert 0 < (few.sizes > 0).sum() < 500
    with expect_error():
        make("iid", clients=500, min_client_size=10, on_small="drop")


@pytest.mark.parametrize(("on_small", "said"), [("move", "were moved to them"), ("drop", "they are left out, with")])
def test_a_run_reports_it_in_a_line_and_in_its_summary(tmp_path, capsys, on_small, said):
    tight = (
        "partition.alpha=0.05", "partition.min_client_size=60", "partition.max_redraws=0", f"partition.on_small={on_small}",
    )  # fmt: skip
    shape = ("engine=local", "num_clients=20", "num_rounds=1", "model=mlp", "strategy=fedavg")
    summary = run(config_of(*shape, *tight, f"output_dir={tmp_path}/run"))
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "min_client_size" in text]
    assert line.startswith(
        f"{summary['partition_small_clients']} clients had drawn fewer than partition.min_client_size=60 examples: "
    )
    assert said in line
    changed = summary["partition_small_moved" if on_small == "move" else "partition_small_dropped"]
    assert changed > 0
    assert str(changed) in line
    plain = run(config_of(*shape, "partition=iid", f"output_dir={tmp_path}/plain"))
    assert not any(key.startswith("partition_small") for key in plain)
    assert "min_client_size" not in capsys.readouterr().out
