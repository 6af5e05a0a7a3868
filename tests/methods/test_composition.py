"""Strategies with clients of other methods: any two with the same messages work together."""

import re
from functools import cache

import pytest
from hand import COHORTS_WITH_ABSENCES, GOLDEN, WORK
from helpers import FULL_COHORTS, PATTERN, close, digits_run, run_scalar, slow
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
EVERYBODY = [range(5)] * 3


def quick(clients, rule):
    """Whether a pair is a default one: all strategies over updates, and one strategy over some other clients."""
    return clients == "pmfl" or (rule == "fedau" and clients in ("fedavg", "moon"))


@pytest.mark.parametrize(
    ("clients", "rule"),
    [(clients, rule) if quick(clients, rule) else slow(clients, rule) for clients in NOTHING_OF_ITS_OWN for rule in GOLDEN],
)
def test_server_rules_go_with_any_client_half(clients, rule):
    """Clients that upload models or updates, with strategies over either, give the strategy's golden values."""
    changes, full, pattern = GOLDEN[rule]
    for schedule, values in ((FULL_COHORTS, full), (PATTERN, pattern)):
        found = run_scalar(clients, schedule, server=rule, **changes, **NOTHING_OF_ITS_OWN[clients])
        assert found == pytest.approx(values, abs=1e-5)


LONE_RATE = {"momentum": 0.0, "weight_decay": 0.0, "lr_decay": 1.0, "clip_norm": None}
FEDAVG = GOLDEN["fedavg"][1:]
GOLDEN_RUNS = [
    *((name, *GOLDEN[name]) for name in ("fedadam", "fedagm", "fedavgm", "fedhyper", "fedvarp", "mifa")),
    ("fedavg", {"weights": "samples"}, *FEDAVG),
    ("fedavg", {"weights": "uniform"}, *FEDAVG),
    ("moon", {"contrast_weight": 0.0, "local": LONE_RATE}, *FEDAVG),
    ("fedprox", {"proximal_weight": 0.5}, [2.185, 2.335775, 2.458657, 2.558805, 2.640426],
     [2.185, 2.890775, 2.633482, 2.633482, 2.978788]),
    ("fedau", {"cutoff": 50}, FEDAVG[0], [2.126667, 2.371978, 2.261527, 2.261527, 2.638607]),
    ("fedau", {"cutoff": 2}, FEDAVG[0], [2.126667, 2.371978, 2.301302, 2.301302, 2.680013]),
    # In round 3 client 1 continues from 2.19 after 2 rounds, and client 3 from 2 after 3: (2.19 - 0.8322 + 2 + 0.57) / 2.
    ("fedawe", {"clip_norm": None}, FEDAVG[0], [2.19, 2.9139, 1.9639, 1.9639, 3.515297]),
    # The clipped step of client 1 in round 2, and in round 5 the step from (2.69 + 1.9639) / 2.
    ("fedawe", {"clip_norm": 0.5}, FEDAVG[0], [2.19, 2.69, 1.9639, 1.9639, 2.82695]),
    ("fedawe", {"server_lr": 0.5, "clip_norm": None}, [2.095, 2.180975, 2.258782, 2.329198, 2.392924],
     [2.095, 2.465975, 1.990975, 1.990975, 2.827931]),
    # Steps of 0.1: w -= 0.1 ((w - a) - g + alpha (w - W)). Then g and h follow the algorithm.
    ("feddyn", {"proximal_weight": 0.1, "local": LONE_RATE}, [2.378, 2.794972, 3.164005, 3.42532, 3.551922],
     [2.315, 3.350569, 3.126985, 3.126985, 3.660479]),
    ("feddyn", {"proximal_weight": 1.0, "local": LONE_RATE}, [2.36, 2.7056, 2.979776, 3.158889, 3.244921],
     [2.3, 3.1352, 2.99744, 2.99744, 3.387574]),
    # Delta_k = 0.19 (a_k - W), a = (0, 6, 3).
    ("fedexp", {"epsilon": 0.001, "local": LONE_RATE}, [2.647075, 3.99574, 3.346836, 1.984231, 2.624685],
     [2.924394, 3.508759, 3.127095, 3.127095, 3.409068]),
    ("fedexp", {"epsilon": 0.1, "local": LONE_RATE}, *GOLDEN["fedexp"][1:]),
    ("pmfl", {"contrast_weight": 0.0, "history_size": 0}, FEDAVG[0], [2.126667, 2.371978, 2.265964, 2.265964, 2.776335]),
    ("pmfl", {"contrast_weight": 0.0, "history_size": 3}, *GOLDEN["pmfl"][1:]),
    ("pmfl", {"contrast_weight": 0.0, "history_size": 0, "cutoff": 2}, FEDAVG[0],
     [2.126667, 2.371978, 2.206302, 2.206302, 2.590416]),
]  # fmt: skip


@pytest.mark.parametrize("stack_size", [slow(1), 3])
@pytest.mark.parametrize(("name", "changes", "full", "pattern"), GOLDEN_RUNS)
def test_golden_values(name, changes, full, pattern, stack_size):
    """f_k = (w - a_k)^2 / 2, and two local steps of 0.1."""
    for schedule, values in ((FULL_COHORTS, full), (PATTERN, pattern)):
        assert run_scalar(name, schedule, stack_size=stack_size, **changes) == pytest.approx(values, abs=1e-5)


@cache
def fedavg_on_digits(plain):
    return digits_run("fedavg", weights="uniform", local=WORK if plain else {})[0][-1]


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("fedavgm", {"weights": "uniform", "server_momentum": 0.0}),
        ("fedagm", {"weights": "uniform", "server_momentum": 0.0, "local": {"proximal_weight": 0.0}}),
        ("fedprox", {"weights": "uniform", "proximal_weight": 0.0}),
        ("moon", {"weights": "uniform", "contrast_weight": 0.0, "local": WORK}),
        ("fedau", {}),  # every interval is 1
        ("pmfl", {"history_size": 0, "contrast_weight": 0.0, "adaptive_weights": False}),
        slow("pmfl", {"history_size": 0, "contrast_weight": 0.0}),  # x = 1 at full participation
        ("pmfl", {"history_size": 0, "buffer_size": 0}),  # P2: no buffer, no contrast
        ("pmfl", {"history_size": 0, "threshold": "constant", "threshold_value": -1.0}),  # P4
    ],
)
def test_neutral_settings_equal_fedavg(name, neutral):
    close(digits_run(name, **neutral)[0][-1], fedavg_on_digits(name == "moon"))


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


@pytest.mark.parametrize("weights", ["uniform", slow("samples")])
@pytest.mark.parametrize(
    ("name", "changes", "local", "rounds"),
    [
        ("fedvarp", {}, {}, EVERYBODY),
        ("mifa", {}, {"lr_decay": 0.9}, EVERYBODY),
        ("fedawe", {"clip_norm": None}, {}, EVERYBODY),
        ("fednova", {}, {"epochs": None, "iterations": 3}, EVERYBODY),
        ("fedexp", {"epsilon": 1e9}, {}, COHORTS_WITH_ABSENCES),
        ("fedhyper", {"bound": 1.0}, {}, COHORTS_WITH_ABSENCES),
    ],
)
def test_a_rule_without_its_effect_is_fedavg_round_by_round(name, changes, local, rounds, weights):
    how = {"clients": 5, "schedule": rounds, "local": WORK | local, "weights": weights}
    ours, fedavg = (digits_run(each, len(rounds), **how, **own)[0] for each, own in ((name, changes), ("fedavg", {})))
    for a, b in zip(ours, fedavg, strict=True):
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
