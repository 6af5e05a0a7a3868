"""The table of the papers' claims, against runs whose differences are known."""

import pytest
import yaml
from messages import ROOT
from reported import method, write_run

from contrafed.report import claims, published, results
from contrafed.report.runs import find

CLAIM = {
    "claim": "MOON is above FedAvg", "where": "here", "first": {"file": "some", "method": "moon"},
    "second": {"file": "some", "method": "fedavg"}, "value": "accuracy_final", "published": 2.0, "rounds": 20, "reason": "",
}  # fmt: skip


def find_one(tmp_path, ours, theirs, **changes):
    """Return the finding of one claim about runs with these last accuracies, a seed each."""
    for name, values in (("moon", ours), ("fedavg", theirs)):
        for seed, value in enumerate(values):
            write_run(tmp_path / "runs" / f"{name}{seed}", (0.1, 0.2, value), **method(name, seed=seed))
    results.keep(find([tmp_path / "runs"]), tmp_path, "some")
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([CLAIM | changes]))
    return claims.find_claims(tmp_path)[0]


@pytest.mark.parametrize(
    ("ours", "theirs", "changes", "verdict"),
    [
        ((0.50, 0.60), (0.40, 0.50), {}, "reproduced"),
        ((0.50, 0.60), (0.40, 0.50), {"published": -1.0}, "not reproduced"),
        ((0.50,), (0.40,), {}, "not decided, needs at least 3 seeds"),
        ((0.50,), (0.40,), {"rounds": 1000}, "not decided, needs all 1,000 rounds and at least 3 seeds"),
        ((0.50, 0.40), (0.40, 0.50), {}, "not decided, needs about 395 seeds"),
    ],
)
def test_a_verdict(tmp_path, ours, theirs, changes, verdict):
    assert find_one(tmp_path, ours, theirs, **changes).verdict == verdict


@pytest.mark.parametrize(("on_digits", "seeds"), [((0.50, 0.52), "about 7 seeds"), ((0.50, 0.58), "about 65 seeds")])
def test_a_claim_with_one_seed_needs_as_many_as_the_spread_on_the_digits_says(tmp_path, on_digits, seeds):
    """Differences of 10 and 8 points, or 10 and 2, published 2 points."""
    for name, values in (("moon", (0.60, 0.60)), ("fedavg", on_digits)):
        for seed, value in enumerate(values):
            write_run(tmp_path / "digits" / f"{name}{seed}", (0.1, 0.2, value), **method(name, seed=seed))
    results.keep(find([tmp_path / "digits"]), tmp_path, "digits")
    said = find_one(tmp_path, (0.50,), (0.40,)).verdict
    assert said == f"not decided, needs {seeds} by the spread on the digits"


def test_the_best_other_method_and_the_cells_by_hand(tmp_path):
    finding = find_one(tmp_path, (0.50, 0.62), (0.40, 0.50), second={"file": "some", "method": "best"})
    assert finding.row[:5] == ("MOON is above FedAvg", "here", "2", "20 of 20", "+2.00")
    assert finding.row[5].startswith("+11.00 (")


@pytest.mark.parametrize("changes", [{"more": 1}, {"first": {"file": "some", "method": "ditto"}}])
def test_a_claim_without_runs_or_with_other_keys_is_an_error(tmp_path, changes, expect_error):
    with expect_error("claims.yaml"):
        find_one(tmp_path, (0.5,), (0.4,), **changes)


def test_the_papers_claims_have_the_published_differences():
    for claim in yaml.safe_load((ROOT / "results" / "claims.yaml").read_text(encoding="utf-8")):
        paper, table, *_ = claim["where"].split(", ")
        cells = published.load(paper.lower())
        cells = cells[(cells["table"] == table.split()[1]) & cells["dataset"].str.replace("-", "").eq("CIFAR10")]
        first, second = (claim[side]["method"] for side in ("first", "second"))
        found = []
        for _, column in cells.groupby(["setting", "metric"]):
            values = dict(zip(column["method"], column["value"], strict=True))
            others = [v for name, v in values.items() if name != first] if second == claims.BEST else [values.get(second)]
            if first in values and None not in others:
                found.append(round(values[first] - max(others), 2))
        assert claim["published"] in found, claim
