"""Strategies with clients of other methods: any two with the same messages work together."""

import re

import pytest
from hand import FULL_COHORTS, GOLDEN, PATTERN, WORK
from helpers import close, digits_run, run_scalar
from omegaconf import OmegaConf

from contrafed.core import registry

PLAIN_WORK = {"momentum": 0.0, "lr_decay": 1.0, "epoch_lr_decay": 1.0, "weight_decay": 0.0, "clip_norm": None, "augment": []}
NOTHING_OF_ITS_OWN = {
    "fedavg": {},
    "fedprox": {"proximal_weight": 0.0},
    "moon": {"contrast_weight": 0.0, "local": PLAIN_WORK},
    "fedrcl": {"local": PLAIN_WORK},  # its contrast of one example is 0
    "pmfl": {"contrast_weight": 0.0},
    "fedlc": {"calibration": 0.0},
    "feddecorr": {"local": PLAIN_WORK},  # its penalty of one example is 0
}


@pytest.mark.parametrize("rule", GOLDEN)
@pytest.mark.parametrize("clients", NOTHING_OF_ITS_OWN)
def test_server_rules_go_with_any_client_half(clients, rule):
    """Clients that upload models or updates, with strategies over either, give the strategy's golden values."""
    changes, full, pattern = GOLDEN[rule]
    for schedule, values in ((FULL_COHORTS, full), (PATTERN, pattern)):
        found = run_scalar(clients, schedule, server=rule, **changes, **NOTHING_OF_ITS_OWN[clients])
        assert found == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("stack_size", [1, 3])
@pytest.mark.parametrize("name", ["fedadam", "fedagm", "fedavgm", "fedhyper", "fedvarp", "mifa"])
def test_golden_values(name, stack_size):
    changes, full, pattern = GOLDEN[name]
    for schedule, values in ((FULL_COHORTS, full), (PATTERN, pattern)):
        assert run_scalar(name, schedule, stack_size=stack_size, **changes) == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "neutral"),
    [("fedavgm", {"server_momentum": 0.0}), ("fedagm", {"server_momentum": 0.0, "local": {"proximal_weight": 0.0}})],
)
def test_neutral_server_rules_are_fedavg_also_beside_other_client_halves(name, neutral):
    for rounds in (FULL_COHORTS, PATTERN):
        assert run_scalar(name, rounds, **neutral) == pytest.approx(run_scalar("fedavg", rounds), rel=1e-12)
    for clients in ("fedrcl", "pmfl"):
        own = NOTHING_OF_ITS_OWN[clients] | {"local": PLAIN_WORK | neutral.get("local", {})}
        values = run_scalar(clients, PATTERN, server=name, server_momentum=0.0, **own)
        assert values == pytest.approx(run_scalar("fedavg", PATTERN), rel=1e-12)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("name", "decay"), [("fedvarp", {}), ("mifa", {"lr_decay": 0.9})])
def test_with_everybody_there_a_table_of_updates_is_fedavg(name, decay, weights):
    same_clients = {"clients": 5, "local": WORK | decay, "weights": weights}
    for a, b in zip(*(digits_run(each, 3, **same_clients)[0] for each in (name, "fedavg")), strict=True):
        close(a, b, 1e-12)


def test_the_docs_say_which_methods_leave_their_rule_to_choose():
    documented = {"free": set(), "own": set()}
    for line in (registry.CONF.parent / "docs" / "METHODS.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = {name for quoted in re.findall(r"`([^`]*)`", cells[0]) for name in quoted.split()}
        if len(cells) == 2 and names and names <= set(registry.choices("strategy")):
            documented["free" if cells[1] == "all" else "own"] |= names
    found = {"free": set(), "own": set()}
    for name in registry.choices("strategy"):
        found["free" if leaves_its_rule(name) else "own"].add(name)
    rules = set(registry.choices("strategy/server"))
    assert documented["own"] == found["own"]
    assert documented["free"] == found["free"] - (rules - {"fedavg", "pmfl", "pfedme", "fedhyper"})


def leaves_its_rule(name):
    """Return whether a strategy is among the defaults of a method's YAML, or of the one that it inherits."""
    defaults = OmegaConf.load(registry.CONF / "strategy" / f"{name}.yaml").get("defaults", [])
    inherited = [item for item in defaults if item in registry.choices("strategy")]
    return any("server" in str(item) for item in defaults) or any(map(leaves_its_rule, inherited))
