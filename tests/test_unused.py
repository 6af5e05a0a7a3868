"""Keys of a command line that have no effect are named before a run."""

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from helpers import config_of
from test_hydra import QUICK_RUN, main

from contrafed.config.run_config import resolve
from contrafed.config.unused import find_unused, warn_of_unused
from contrafed.core.errors import UserError
from contrafed.core.schema import OnlyWith, Range, build


@dataclass(frozen=True)
class Config:
    kind: Literal["a", "b"]
    width: Annotated[int, Range(ge=1), OnlyWith("kind", "b")]
    depth: Annotated[int | None, OnlyWith("kind")]


def test_a_rule_keeps_the_types_and_bounds_of_its_key():
    config = build(Config, {"kind": "a", "width": 2, "depth": None}, "")
    assert (config.width, config.depth) == (2, None)
    with pytest.raises(UserError, match="width"):
        build(Config, {"kind": "a", "width": 0, "depth": None}, "")


def test_a_rule_about_a_key_that_is_not_there_is_one_line():
    @dataclass(frozen=True)
    class Wrong:
        width: Annotated[int, OnlyWith("knid")]

    with pytest.raises(UserError, match="knid"):
        build(Wrong, {"width": 1}, "")


def find(*lines):
    return [line.partition(":")[0] for line in find_unused(lines, resolve(config_of(*lines)))]


@pytest.mark.parametrize(
    ("key", "off", "on"),
    [
        ("participation.floor=0.1", ["participation.beta=null"], ["participation.beta=0.5"]),
        ("partition.pieces=random", ["partition=pathological", "partition.scheme=shards"], ["partition=pathological"]),
        ("partition.distinct=true", ["partition=pathological"], ["partition=pathological", "partition.scheme=shards"]),
        ("partition.feature_shift.strength=0.3", ["partition=feature_shift"], ["partition.feature_shift.kind=blur"]),
        ("partition.scarce_fraction=0.3", [], ["partition.scarce_clients=2"]),
        ("checkpoint_keep=3", [], ["checkpoint_every=5"]),
        ("strategy.temperature=0.1", ["strategy.contrast_weight=0"], []),
        ("strategy.threshold_value=0.1", [], ["strategy.threshold=constant"]),
        ("strategy.cutoff=9", ["strategy.adaptive_weights=false"], []),
        ("strategy.difference=0.1", ["strategy=perfedavg"], ["strategy=perfedavg", "strategy.gradient=hessian_free"]),
        ("schedule.staleness_b=2", ["strategy=fedavg", "clock=lognormal", "schedule=buffered"], None),
        ("attack.fraction=0.1", ["strategy=fedavg", "attack=sign_flip", "attack.clients=[1]"], ["attack=sign_flip"]),
    ],
)
def test_a_key_is_named_where_another_turns_it_off(key, off, on):
    assert find(*off, key) == [key.partition("=")[0]]
    assert on is None or find(*on, key) == []


def test_keys_that_the_command_line_does_not_set_are_not_named():
    assert find("participation.beta=null") == []


def test_a_sweep_counts_the_jobs():
    both = [("strategy.contrast_weight=0", "strategy.temperature=0.1"), ("strategy.temperature=0.1",)]
    (line,) = warn_of_unused((lines, resolve(config_of(*lines))) for lines in both)
    assert line.startswith("strategy.temperature:")
    assert "strategy.contrast_weight=0" in line
    assert "1 of 2" in line


def test_runs_and_sweeps_print_the_line_once(tmp_path):
    asked = (*QUICK_RUN[:-1], "participation=bernoulli", "participation.beta=null")
    for more in (["participation.floor=0.1", "output_dir=run"], ["-m", "participation.floor=0.1,0.2", "output_dir=jobs"]):
        done = main(tmp_path, *asked, *more)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("participation.floor: no effect") == 1
