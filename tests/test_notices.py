"""Notices that a run prints with its numbers, and attacks that would do nothing."""

import pytest
from helpers import config_of

from contrafed.config.run_config import resolve
from contrafed.runs.notices import said_of_attackers, said_of_delta


def resolve_overrides(*overrides):
    return resolve(config_of("strategy=fedavg", *overrides))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((), ""),
        (("attack=ipm", "num_clients=10"), "2 of 10 clients attack: attack=ipm"),
        (("attack=label_flip", "attack.clients=[0,3,4]", "num_clients=10"), "3 of 10 clients attack: attack=label_flip"),
        (("attack=ipm", "attack.fraction=0"), ""),
    ],
)
def test_how_many_attack(asked, said):
    assert said_of_attackers(resolve_overrides(*asked)) == said


def test_a_share_that_is_nobody_is_refused(expect_error):
    with expect_error("attack.fraction"):
        resolve_overrides("attack=ipm", "attack.fraction=0.04", "num_clients=10")


@pytest.mark.parametrize("attack", ["ipm", "alie"])
def test_attackers_that_go_by_honest_clients_need_some(attack, expect_error):
    with expect_error("attack"):
        resolve_overrides(f"attack={attack}", "attack.fraction=1", "num_clients=4")
    resolve_overrides("attack=alie", "attack.fraction=1", "attack.known=attackers", "num_clients=4")
    resolve_overrides("attack=sign_flip", "attack.fraction=1", "num_clients=4")


def test_attackers_that_are_held_out_are_none(expect_error):
    few = ("num_clients=10", "held_out_clients=2", "attack=ipm")
    with expect_error("attack"):
        resolve_overrides(*few, "attack.clients=[8,9]")
    with expect_error("attack"):
        resolve_overrides(*few, "attack.clients=[0,1,2,3,4,5,6,7]")
    assert said_of_attackers(resolve_overrides(*few, "attack.clients=[3,9]")) == "1 of 8 clients attack: attack=ipm"


@pytest.mark.parametrize(("delta", "loose"), [("0.00001", False), ("0.24", False), ("0.25", True), ("0.9", True)])
def test_a_delta_that_lets_a_client_be_told_apart_is_said(delta, loose):
    line = said_of_delta(resolve_overrides("privacy=central", f"privacy.delta={delta}", "num_clients=4"))
    assert line.startswith(f"privacy.delta={delta} is not below 1/num_clients=0.25: ") if loose else line == ""
