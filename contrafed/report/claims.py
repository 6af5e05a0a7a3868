"""Compare claims of the papers with the runs in ``results/``: published difference, our difference, and a verdict.

``results/claims.yaml`` is a list of claims. Each says that one method is above another:

    - claim: PMFL is above FedAU
      where: Table I, CIFAR-10, Bernoulli
      first: {file: pmfl-table1, method: pmfl}       # runs of results/FILE.csv, keys with a dot select by the configuration
      second: {file: pmfl-table1, method: fedau}     # method: best is the other method with the best mean over seeds
      value: accuracy_top5_mean                      # a key of the summary, a fraction
      published: 0.50                                # points
      rounds: 10000                                  # of the paper
      reason: Equations 10 and 11 as printed
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from contrafed.core.errors import UserError
from contrafed.core.schema import flatten_keys
from contrafed.report import results
from contrafed.report.runs import FinishedRun
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
    rounds: int  # that the shorter run has
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
        ours = f"{self.difference.mean:+.2f}"
        if self.difference.n > 1:
            ours += f" ({self.difference.low:+.2f} to {self.difference.high:+.2f})"
        claim = self.claim
        rounds = f"{self.rounds:,} of {claim['rounds']:,}"
        place = (str(claim["claim"]), str(claim["where"]), str(self.difference.n), rounds)
        return (*place, f"{claim['published']:+.2f}", ours, self.verdict, self.needs, str(claim["reason"]))


def _say_seeds(seeds: float) -> str:
    return f"about {max(seeds, MIN_SEEDS):,.0f} seeds" if math.isfinite(seeds) else "more than 10,000 seeds"


def find_claims(folder: Path) -> list[Finding]:
    """Compare each claim of ``claims.yaml`` in ``folder`` with the runs there. Without the file there is none.

    Raises:
        UserError: For a claim with other keys than ``KEYS``, or without a run.
    """
    path = folder / "claims.yaml"
    if not path.exists():
        return []
    claims = yaml.safe_load(path.read_text(encoding="utf-8"))
    for claim in claims:
        if not isinstance(claim, dict) or set(claim) != KEYS:
            raise UserError(f"{path.name}: every claim must have the keys {', '.join(sorted(KEYS))}, got {claim!r}")
    files = {claim[side]["file"] for claim in claims for side in ("first", "second")}
    runs = {file: results.load(folder / f"{file}.csv") for file in sorted(files)}
    digits = results.load(folder / f"{SPREAD}.csv") if (folder / f"{SPREAD}.csv").exists() else []
    return [_compare(claim, runs, digits) for claim in claims]


def build_claims_table(findings: Sequence[Finding], heads: Sequence[str] = HEADS) -> Table:
    """Return the table of claims, or some of its columns."""
    places = [HEADS.index(head) for head in heads]
    rows = tuple(tuple(finding.row[place] for place in places) for finding in findings)
    return Table("Claims of the papers", tuple(heads), rows, pd.DataFrame(rows, columns=list(heads)))


def _compare(claim: Mapping[str, Any], runs: Mapping[str, list[FinishedRun]], digits: Sequence[FinishedRun]) -> Finding:
    """Compare the two sides of a claim. ``digits`` has runs of the same methods with several seeds."""
    first, second = (_select(claim, side, runs) for side in ("first", "second"))
    values = dict[str, dict[int, float]]()
    for run in second:
        values.setdefault(run.method, {})[run.summary["seed"]] = 100 * run.number(claim["value"])
    ours = {run.summary["seed"]: 100 * run.number(claim["value"]) for run in first}
    found = {method: [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs)] for method, theirs in values.items()}
    found = {method: differences for method, differences in found.items() if differences}
    if not found:
        raise UserError(f"claims.yaml: the two sides of '{claim['claim']}' share no seed")
    best = min(found, key=lambda method: float(np.mean(found[method])))
    differences, std = found[best], over_seeds(found[best])[1]
    spread = measure_spread(digits, first[0], best, claim["value"])
    rounds = min(run.summary["rounds"] for run in (*first, *second))
    return Finding(claim, compare_pairs(differences, [0.0] * len(differences)), std, rounds, spread)


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
    """Return the runs of one side of a claim, at most one of a method and seed."""
    wanted = dict(claim[side])
    file, method = wanted.pop("file"), wanted.pop("method")
    besides = claim["first"]["method"] if method == BEST else None
    found = []
    for run in runs[file]:
        config = flatten_keys(run.config)
        fits = all(config.get(key) == value for key, value in wanted.items()) and not math.isnan(run.number(claim["value"]))
        if fits and (run.method == method or (besides is not None and run.method != besides)):
            found.append(run)
    if not found:
        raise UserError(f"claims.yaml: results/{file}.csv has no run for the {side} side of '{claim['claim']}'")
    if len({(run.method, run.summary["seed"]) for run in found}) < len(found):
        raise UserError(f"claims.yaml: {side} of '{claim['claim']}' has two runs of a method and seed. Fix: name a key of one")
    return found
