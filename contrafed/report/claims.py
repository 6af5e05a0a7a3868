"""Compare claims of the papers with the runs in ``results/``: published difference, our difference, and a verdict.

``results/claims.yaml`` is a list of claims. Each says that one method is above another:

    - claim: PMFL is above FedAU
      where: Table I, CIFAR-10, Bernoulli
      first: {file: pmfl-table1, method: pmfl}       # runs of results/FILE.csv, keys with a dot select by the configuration
      second: {file: pmfl-table1, method: fedau}     # method: best is the other method with the best mean over seeds
      value: accuracy_top5_mean                      # a key of the summary, a fraction
      published: 0.50                                # points
      rounds: 10000                                  # of the paper, or of the code where the paper prints none
      reason: Equations 10 and 11 as printed

Both sides are compared on the seeds that all runs have, until the last round that all have. They must have the same clients.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from contrafed.core.errors import UserError
from contrafed.core.schema import flatten_keys
from contrafed.report import results
from contrafed.report.groups import DATA, OF_FILES, settings
from contrafed.report.runs import FinishedRun, complete
from contrafed.report.statistics import PairedDifference, compare_pairs, count_seeds, over_seeds
from contrafed.report.tables import Table

KEYS = {"claim", "where", "first", "second", "value", "published", "rounds", "reason"}
BEST = "best"
SPREAD = "digits"  # runs of many methods with several seeds: how much two methods' difference varies
MIN_SEEDS = 3  # of a verdict
HEADS = ("claim", "table", "seeds", "rounds", "published", "ours", "verdict", "still needs", "reason")


@dataclass(frozen=True)
class Finding:
    """A claim compared with our runs. Differences are in points."""

    claim: Mapping[str, Any]
    difference: PairedDifference
    std: float  # sample standard deviation of the paired differences, NaN for one seed
    rounds: int  # until which the runs are compared
    spread: float = math.nan  # the same of these two methods on the digits, NaN if they have no runs there

    @property
    def verdict(self) -> str:
        """Reproduced, not reproduced, or not decided."""
        return "not decided" if self.needs else self._result

    @property
    def needs(self) -> str:
        """What a verdict still needs: rounds, seeds, both or nothing."""
        needs = []
        if self.rounds < self.claim["rounds"]:
            needs.append(f"{self.claim['rounds']:,} rounds")
        if self.difference.n < MIN_SEEDS:
            needs.append(self._seeds_for_few)
        elif not self._result:
            needs.append(_say_seeds(max(count_seeds(self.std, abs(self.claim["published"])), self.difference.n + 1)))
        return ", ".join(needs)

    @property
    def _result(self) -> str:
        """What the interval shows: that the sign is the published one, that the difference is not as large, or nothing."""
        low, high = self.difference.low, self.difference.high
        if self.claim["published"] < 0:
            low, high = -high, -low
        return "reproduced" if low > 0 else "not reproduced" if high < abs(self.claim["published"]) else ""

    @property
    def _seeds_for_few(self) -> str:
        """How many seeds a claim with one or two needs, by the digits' spread if that is known."""
        if math.isnan(self.spread):
            return f"at least {MIN_SEEDS} seeds"
        return _say_seeds(count_seeds(self.spread, abs(self.claim["published"])))

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of a table's row."""
        ours = f"{self.difference.mean:+z.2f}"
        if not math.isnan(self.difference.low):
            ours += f" ({self.difference.low:+z.2f} to {self.difference.high:+z.2f})"
        claim = self.claim
        rounds = f"{self.rounds:,} of {claim['rounds']:,}"
        place = (str(claim["claim"]), str(claim["where"]), str(self.difference.n), rounds)
        return (*place, f"{claim['published']:+.2f}", ours, self.verdict, self.needs, str(claim["reason"]))


def _say_seeds(seeds: float) -> str:
    return f"about {max(seeds, MIN_SEEDS):,.0f} seeds" if math.isfinite(seeds) else "more than 10,000 seeds"


def find_claims(folder: Path) -> list[Finding]:
    """Compare each claim of ``claims.yaml`` in ``folder`` with the runs there. Without the file there is none.

    Raises:
        UserError: For a file that is no list of claims, and a claim without runs or whose sides have other clients.
    """
    path = folder / "claims.yaml"
    if not path.exists():
        return []
    claims = _read(path)
    files = {claim[side]["file"] for claim in claims for side in ("first", "second")}
    runs = {file: results.load(folder / f"{file}.csv") for file in sorted(files)}
    digits = results.load(folder / f"{SPREAD}.csv") if (folder / f"{SPREAD}.csv").exists() else []
    return [_compare(claim, runs, digits) for claim in claims]


def build_claims_table(findings: Sequence[Finding], heads: Sequence[str] = HEADS) -> Table:
    """Return the table of claims, or some of its columns."""
    places = [HEADS.index(head) for head in heads]
    rows = tuple(tuple(finding.row[place] for place in places) for finding in findings)
    return Table("Claims of the papers", tuple(heads), rows, pd.DataFrame(rows, columns=list(heads)))


def _read(path: Path) -> list[dict[str, Any]]:
    """Return the claims of a file. Raises ``UserError`` naming what is wrong."""
    try:
        claims = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"cannot read {path} ({type(error).__name__})") from error
    if not isinstance(claims, list):
        raise UserError(f"{path.name} must be a list of claims, got {type(claims).__name__}")
    for claim in claims:
        if not isinstance(claim, dict) or set(claim) != KEYS:
            raise UserError(f"{path.name}: every claim must have the keys {', '.join(sorted(KEYS))}, got {claim!r}")
        for side in ("first", "second"):
            if not isinstance(claim[side], dict) or not {"file", "method"} <= set(claim[side]):
                raise UserError(f"{path.name}: {side} of '{claim['claim']}' must have the keys file and method")
        for key in ("published", "rounds"):
            if not isinstance(claim[key], int | float):
                raise UserError(f"{path.name}: {key} of '{claim['claim']}' must be a number, got {claim[key]!r}")
    return claims


def _compare(claim: Mapping[str, Any], runs: Mapping[str, list[FinishedRun]], digits: Sequence[FinishedRun]) -> Finding:
    """Compare the two sides of a claim. ``digits`` has runs of the same methods with several seeds."""
    first, second = (_select(claim, side, runs) for side in ("first", "second"))
    seeds = set.intersection(*({run.summary["seed"] for run in each} for each in (first, *_by_method(second).values())))
    if not seeds:
        raise UserError(f"claims.yaml: the runs of '{claim['claim']}' share no seed")
    first, second = ([run for run in side if run.summary["seed"] in seeds] for side in (first, second))
    _check_clients(claim, [*first, *second])
    rounds = min(run.summary["rounds"] for run in (*first, *second))
    ours = _values(claim, first, rounds)
    found = {
        method: np.subtract(ours, _values(claim, theirs, rounds)).tolist() for method, theirs in _by_method(second).items()
    }
    best = min(found, key=lambda method: float(np.mean(found[method])))
    differences, std = found[best], over_seeds(found[best])[1]
    spread = measure_spread(digits, first[0], best, claim["value"])
    # The best of several is chosen after looking, so the interval holds for all of them at once.
    return Finding(claim, compare_pairs(differences, [0.0] * len(differences), len(found)), std, rounds, spread)


def _by_method(runs: Sequence[FinishedRun]) -> dict[str, list[FinishedRun]]:
    """Return {method: its runs}, in their order."""
    found: dict[str, list[FinishedRun]] = {}
    for run in runs:
        found.setdefault(run.method, []).append(run)
    return found


def _values(claim: Mapping[str, Any], runs: Sequence[FinishedRun], until: int) -> list[float]:
    """Return each seed's number in percent, as it was after round ``until``.

    Raises:
        UserError: If a run has no such number.
    """
    found = list[float]()
    for run in runs:
        if run.summary["rounds"] > until:
            metrics = run.metrics[run.metrics["round"] <= until]
            run = replace(run, metrics=metrics, summary=complete({}, run.config, metrics))
        found.append(100 * run.number(claim["value"]))
        if math.isnan(found[-1]):
            raise UserError(f"claims.yaml: {run.name} of '{claim['claim']}' has no {claim['value']} until round {until}")
    return found


def _check_clients(claim: Mapping[str, Any], runs: Sequence[FinishedRun]) -> None:
    """Raise ``UserError`` unless runs of a seed have the same clients: their number, data, availability and random draws."""
    known: dict[Any, dict[str, Any]] = {}
    for run, table in zip(runs, settings(runs), strict=True):
        seed = run.summary["seed"]
        own = {key: value for key, value in table.items() if key.startswith(OF_FILES) or key in ("num_clients", DATA)}
        own["federation_seed"] = seed if table.get("federation_seed") is None else table["federation_seed"]
        other = known.setdefault(seed, own)
        if wrong := [key for key in own if key in other and own[key] != other[key]]:
            said = f"{wrong[0]} is {own[wrong[0]]} and {other[wrong[0]]} with seed {seed}"
            raise UserError(f"claims.yaml: the sides of '{claim['claim']}' have other clients: {said}")


def measure_spread(runs: Sequence[FinishedRun], first: FinishedRun, second: str, value: str) -> float:
    """Return the standard deviation over seeds of two methods' difference in points, in the first one's participation pattern.

    If the runs do not have its pattern, the standard deviation is pooled over those that they have. It is NaN unless both
    methods have two seeds of one pattern.
    """
    found: dict[tuple[Any, Any], dict[str, float]] = {}
    for run in runs:
        if run.method in (first.method, second):
            place = run.config["participation"]["name"], run.summary["seed"]
            found.setdefault(place, {})[run.method] = 100 * run.number(value)
    patterns: dict[Any, list[float]] = {}
    for (pattern, _), values in found.items():
        if len(values) == 2:
            patterns.setdefault(pattern, []).append(values[first.method] - values[second])
    several = {pattern: np.array(differences) for pattern, differences in patterns.items() if len(differences) > 1}
    own = several.get(first.config["participation"]["name"])
    taken = [own] if own is not None else list(several.values())
    freedom = sum(len(differences) - 1 for differences in taken)
    squares = sum(float(((differences - differences.mean()) ** 2).sum()) for differences in taken)
    return math.sqrt(squares / freedom) if freedom else math.nan


def _select(claim: Mapping[str, Any], side: str, runs: Mapping[str, list[FinishedRun]]) -> list[FinishedRun]:
    """Return the runs of one side of a claim, sorted by seed, at most one of a method and seed."""
    wanted = dict(claim[side])
    file, method = wanted.pop("file"), wanted.pop("method")
    besides = claim["first"]["method"] if method == BEST else None
    found = []
    for run in runs[file]:
        config = flatten_keys(run.config)
        fits = all(config.get(key) == value for key, value in wanted.items())
        if fits and (run.method == method or (besides is not None and run.method != besides)):
            found.append(run)
    if not found:
        raise UserError(f"claims.yaml: results/{file}.csv has no run for the {side} side of '{claim['claim']}'")
    if len({(run.method, run.summary["seed"]) for run in found}) < len(found):
        raise UserError(f"claims.yaml: {side} of '{claim['claim']}' has two runs of a method and seed. Fix: name a key of one")
    return sorted(found, key=lambda run: run.summary["seed"])
