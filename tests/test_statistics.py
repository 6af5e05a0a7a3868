"""Every number of a report by hand: over seeds, over clients, over rounds, between two methods, and between two orders."""

import math
import re

import numpy as np
import pytest
import yaml
from messages import ROOT
from reported import method, write_run
from scipy import stats

from contrafed.core import registry
from contrafed.report import claims, published, results
from contrafed.report.runs import find
from contrafed.report.statistics import (
    band,
    compare_pairs,
    correct_holm,
    count_seeds,
    first_at,
    over_seeds,
    rank_methods,
    ranks,
    spearman,
)
from contrafed.runs.output.series import summary_of_curves

NAN = float("nan")


def test_over_seeds_is_the_sample_deviation():
    assert over_seeds([1, 3]) == pytest.approx((2, math.sqrt(2)))
    assert over_seeds([1, 2, 3, NAN]) == pytest.approx((2, 1))
    mean, deviation = over_seeds([5])
    assert (mean, math.isnan(deviation)) == (5, True)
    assert all(math.isnan(value) for value in over_seeds([]))


def test_over_clients_is_the_population_deviation_of_the_best_round():
    # Clients with (correct, total) of (9, 10), (30, 90): micro 0.39, std 0.2833. A later round is worse.
    accuracies = np.array([9 / 10, 30 / 90])
    curves = {
        ("personal", "test", "accuracy"): [(1, 39 / 100), (2, 0.3)],
        ("personal", "test", "accuracy_std"): [(1, float(accuracies.std())), (2, 0.1)],
    }
    summary = summary_of_curves(curves)
    assert summary["personal_accuracy_best"] == pytest.approx(0.39)
    assert summary["personal_accuracy_best_std"] == pytest.approx(0.2833333)
    assert summary["personal_accuracy_std"] == 0.1
    # Two seeds with a std of 0.2 and 0.4 over clients: a table has their mean, not their own std.
    assert over_seeds([0.2, 0.4])[0] == pytest.approx(0.3)


def test_ranks_share_ties():
    assert ranks([90, 95, 90, 80]) == [2.5, 1, 2.5, 4]
    assert ranks([116, 54, 200], higher_is_better=False) == [2, 1, 3]
    assert ranks([7, NAN, 9])[::2] == [2, 1]
    assert math.isnan(ranks([7, NAN, 9])[1])


def test_spearman_by_hand():
    # Ranks 1 2 3 4 against 1 3 2 4: 1 - 6 (0 + 1 + 1 + 0) / (4 * 15) = 0.8.
    assert spearman([1, 2, 3, 400], [1000, 3000, 2000, 3001]) == (pytest.approx(0.8), 4)
    # A tie has ranks 1.5 1.5 3 against 1 2 3. The covariance is 1.5, and the stds are sqrt(1.5 * 2).
    assert spearman([5, 5, 9], [1, 2, 3]) == (pytest.approx(1.5 / math.sqrt(3)), 3)
    assert spearman([1, 2, NAN, 4], [3, NAN, 1, 1])[1] == 2
    assert math.isnan(spearman([1, 2], [2, 1])[0])
    assert math.isnan(spearman([1, 1, 1], [1, 2, 3])[0])


def test_first_round_at_a_target():
    points = [(0, 0.9), (10, 0.3), (20, 0.6), (30, 0.5), (40, 0.7)]
    assert first_at(points, 0.6) == 20
    assert first_at(points, 0.61) == 40
    assert first_at(points, 0.71) is None  # the initial model is left out


def test_band_over_seeds():
    rounds, mean, deviation = band([[(10, 1.0), (20, 2.0)], [(10, 3.0), (20, 2.0), (30, 9.0)]])
    assert rounds.tolist() == [10, 20]  # the second seed alone has round 30
    assert mean.tolist() == [2, 2]
    assert deviation.tolist() == [pytest.approx(math.sqrt(2)), 0]
    assert band([[(1, 5.0)]])[2].tolist() == [0]


def test_a_paired_difference_by_hand():
    # Differences 1, 2, 3: mean 2, std 1, standard error 1 / sqrt(3), t(0.975, 2) = 4.302653, t = 2 sqrt(3), p = 0.0741799.
    found = compare_pairs([11, 22, 33, NAN, 7], [10, 20, 30, 40, NAN])
    assert (found.n, found.mean) == (3, pytest.approx(2))
    assert (found.low, found.high) == (pytest.approx(2 - 4.302653 / math.sqrt(3)), pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert found.p == pytest.approx(0.0741799, abs=1e-6)
    assert found.is_tie
    assert not compare_pairs([12, 22, 32.1], [10, 20, 30]).is_tie
    assert compare_pairs([5, 6], [5, 6]).p == 1
    equal = compare_pairs([5, 6, 8], [4, 5, 7])  # a t test would find p = 0
    assert (equal.n, equal.mean, math.isnan(equal.low), math.isnan(equal.p), equal.is_tie) == (3, 1, True, True, False)
    alone = compare_pairs([5], [4])
    assert (alone.n, alone.mean, math.isnan(alone.low), math.isnan(alone.p), alone.is_tie) == (1, 1, True, True, False)
    assert compare_pairs([NAN], [1]).n == 0


def test_paired_differences_see_what_separate_means_hide():
    rng = np.random.default_rng(0)
    federation = rng.normal(50, 4, 9)  # all methods of a seed have the same federation
    ours, theirs = federation + 1.5 + rng.normal(0, 0.5, 9), federation + rng.normal(0, 0.5, 9)
    assert stats.ttest_ind(ours, theirs, equal_var=False).pvalue > 0.3
    assert compare_pairs(ours, theirs).p < 0.01


def test_how_many_seeds_a_point_needs():
    # A published value: a paired t test with effect size 0.5, power 0.8 and level 0.05 needs 34 pairs. 1.0 needs 10.
    assert count_seeds(2.0) == 34
    assert count_seeds(1.0) == 10
    assert count_seeds(2.0, difference=2.0) == 10
    assert count_seeds(1e-6) == count_seeds(0) == 2
    assert math.isinf(count_seeds(1000))


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1, and never below the one before.
    assert correct_holm([0.04, 0.01, NAN, 0.03, 0.02])[:2] == pytest.approx([0.06, 0.04])
    assert correct_holm([0.04, 0.01, NAN, 0.03, 0.02])[3:] == pytest.approx([0.06, 0.06])
    assert math.isnan(correct_holm([NAN])[0])
    assert correct_holm([0.6, 0.7]) == [1, 1]


def test_friedman_and_nemenyi_by_hand():
    # Three methods, four settings: ranks 1 2 3 in three of them and 2 1 3 in one, so means 1.25, 1.75, 3.
    # chi2 = 12 * 4 / (3 * 4) * (1.25**2 + 1.75**2 + 3**2 - 3 * 4**2 / 4) = 6.5, exp(-6.5 / 2) = 0.0387742.
    found = rank_methods({"c": [1, 1, 1, 1], "a": [3, 3, 3, 2], "b": [2, 2, 2, 3]})
    assert found.ranks == {"a": 1.25, "b": 1.75, "c": 3}
    assert (found.friedman, found.p) == (pytest.approx(6.5), pytest.approx(math.exp(-3.25)))
    # Demsar's table has q = 2.343 for three methods at 0.05: 2.343 sqrt(3 * 4 / (6 * 4)).
    assert found.critical_difference == pytest.approx(2.343 * math.sqrt(0.5), abs=1e-3)
    assert found.cliques == [(1.25, 1.75), (1.75, 3)]
    assert rank_methods({"a": [1, 2], "b": [2, 1]}) is None
    assert rank_methods({"a": [1], "b": [2], "c": [3]}) is None
    same = rank_methods({"a": [1, 2], "b": [1, 2], "c": [1, 2]})
    assert (same.p, set(same.ranks.values()), same.cliques) == (1, {2}, [(2, 2)])


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
    ("ours", "theirs", "changes", "verdict", "needs"),
    [
        ((0.50, 0.60, 0.62), (0.40, 0.50, 0.50), {}, "reproduced", ""),
        ((0.50, 0.60, 0.62), (0.40, 0.50, 0.50), {"published": -1.0}, "not reproduced", ""),
        ((0.40, 0.50, 0.50), (0.50, 0.60, 0.62), {"published": -1.0}, "reproduced", ""),
        # Differences 1, -1, 0.5: the interval is -2.4 to 2.8.
        ((0.51, 0.49, 0.505), (0.50, 0.50, 0.50), {"published": 5.0}, "not reproduced", ""),
        ((0.51, 0.49, 0.505), (0.50, 0.50, 0.50), {"published": -5.0}, "not reproduced", ""),
        ((0.51, 0.49, 0.505), (0.50, 0.50, 0.50), {"published": 1.0}, "not decided", "about 11 seeds"),
        ((0.50, 0.60, 0.70), (0.40, 0.50, 0.60), {}, "not decided", "about 4 seeds"),  # equal differences have no interval
        ((0.50, 0.60), (0.40, 0.501), {}, "not decided", "at least 3 seeds"),
        ((0.50,), (0.40,), {}, "not decided", "at least 3 seeds"),
        ((0.50,), (0.40,), {"rounds": 1000}, "not decided", "1,000 rounds, at least 3 seeds"),
    ],
)
def test_a_verdict(tmp_path, ours, theirs, changes, verdict, needs):
    found = find_one(tmp_path, ours, theirs, **changes)
    assert (found.verdict, found.needs) == (verdict, needs)


@pytest.mark.parametrize(("on_digits", "seeds"), [((0.50, 0.52), "about 7 seeds"), ((0.50, 0.58), "about 65 seeds")])
def test_a_claim_with_one_seed_needs_as_many_as_the_spread_on_the_digits_says(tmp_path, on_digits, seeds):
    """Differences of 10 and 8 points, or 10 and 2, published 2 points."""
    for name, values in (("moon", (0.60, 0.60)), ("fedavg", on_digits)):
        for seed, value in enumerate(values):
            write_run(tmp_path / "digits" / f"{name}{seed}", (0.1, 0.2, value), **method(name, seed=seed))
    results.keep(find([tmp_path / "digits"]), tmp_path, "digits")
    assert find_one(tmp_path, (0.50,), (0.40,)).needs == seeds


def test_the_digits_spread_is_that_of_the_claims_own_pattern(tmp_path):
    """Differences of 10 and 8 points under the claim's pattern, of 10 and 2 under another."""
    for pattern, second in (("full", 0.52), ("cyclic", 0.58)):
        for name, values in (("moon", (0.60, 0.60)), ("fedavg", (0.50, second))):
            for seed, value in enumerate(values):
                write_run(
                    tmp_path / "digits" / f"{pattern}{name}{seed}", (0.1, 0.2, value), **method(name, seed=seed),
                    participation={"name": pattern},
                )  # fmt: skip
    results.keep(find([tmp_path / "digits"]), tmp_path, "digits")
    assert find_one(tmp_path, (0.50,), (0.40,)).needs == "about 7 seeds"
    assert find_one(tmp_path / "other", (0.50,), (0.40,)).needs == "at least 3 seeds"


def test_the_best_other_method_is_the_best_over_all_seeds(tmp_path):
    for seed, value in enumerate((0.30, 0.55, 0.50)):  # below FedAvg in the mean, above it with seed 1
        write_run(tmp_path / "runs" / f"ditto{seed}", (0.1, 0.2, value), **method("ditto", seed=seed))
    finding = find_one(tmp_path, (0.50, 0.62, 0.60), (0.40, 0.50, 0.50), second={"file": "some", "method": "best"})
    assert finding.row[:5] == ("MOON is above FedAvg", "here", "3", "20 of 20", "+2.00")
    assert finding.row[5].startswith("+10.67 (")


@pytest.mark.parametrize("changes", [{"more": 1}, {"first": {"file": "some", "method": "ditto"}}])
def test_a_claim_without_runs_or_with_other_keys_is_an_error(tmp_path, changes, expect_error):
    with expect_error("claims.yaml"):
        find_one(tmp_path, (0.5,), (0.4,), **changes)


def test_a_claim_with_two_runs_of_a_seed_is_an_error(tmp_path, expect_error):
    write_run(tmp_path / "runs" / "again", (0.1, 0.2, 0.3), **method("moon", seed=0))
    with expect_error("claims.yaml"):
        find_one(tmp_path, (0.5,), (0.4,))


def find_published(claim, run):
    """Return the published value of the cell of a run that a claim is about."""
    if run.method == "pmfl" and run.config["strategy"]["contrast_weight"] == 0:  # Table V's row, in an experiment of Table I
        return find_table_v("pmfl/no_mct")
    said, paper = run.published_values, claim["where"].split(", ")[0].lower()
    cells = published.load(paper)
    place = (cells["table"] == said["table"]) & (cells["dataset"] == said["dataset"]) & (cells["method"] == run.method)
    value = "accuracy_ema_500" if "round 500" in claim["where"] else claim["value"]
    (setting,) = [cell["setting"] for cell in said["cells"] if cell["value"] == value]
    (metric,) = [cell["metric"] for cell in said["cells"] if cell["value"] == value]
    return cells[place & (cells["setting"] == setting) & (cells["metric"] == metric)]["value"].tolist()[0]


def has_cell(claim, run):
    return any(cell["value"] == claim["value"] for cell in run.published_values["cells"])  # FedAvg is another kind of model


def find_table_v(method):
    """Return PMFL's published value of Table V, CIFAR-10, Bernoulli."""
    cells = published.load("pmfl")
    cells = cells[(cells["table"] == "V") & (cells["dataset"] == "CIFAR10") & (cells["method"] == method)]
    (value,) = cells[cells["setting"].str.startswith("bernoulli alpha=0.1 beta=0.1") & (cells["metric"] == "test_accuracy")][
        "value"
    ]
    return value


def test_the_papers_claims_have_the_published_differences_of_their_runs():
    """``where`` names the runs' table, settings, partition and participation, too."""
    for claim in yaml.safe_load((ROOT / "results" / "claims.yaml").read_text(encoding="utf-8")):
        runs = {
            claim[side]["file"]: results.load(ROOT / "results" / f"{claim[side]['file']}.csv") for side in ("first", "second")
        }
        first, second = (claims._select(claim, side, runs) for side in ("first", "second"))
        ours = find_published(claim, first[0])
        several = claim["second"]["method"] == claims.BEST
        theirs = [find_published(claim, run) for run in second if not several or has_cell(claim, run)]
        assert claim["published"] == round(ours - max(theirs), 2), claim
        said = f" {claim['where'].lower()},"
        for run in (*first, *second):
            assert f"settings={run.config['settings']}" in said, claim
            assert re.search(rf" tables? [^,]*\b{run.published_values['table'].lower()}\b", said), claim
            for group in ("participation", "partition"):
                if named := [name for name in registry.choices(group) if f" {name}," in said]:
                    assert named == [run.config[group]["name"]], claim


def test_a_claim_is_compared_after_the_last_round_that_both_have(tmp_path):
    """In round 20 MOON has 50 and FedAvg 40 %. MOON goes on to round 30."""
    write_run(tmp_path / "runs" / "moon", (0.1, 0.2, 0.5, 0.9), **method("moon", seed=0))
    write_run(tmp_path / "runs" / "fedavg", (0.1, 0.2, 0.4), **method("fedavg", seed=0))
    results.keep(find([tmp_path / "runs"]), tmp_path, "some")
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([CLAIM]))
    (found,) = claims.find_claims(tmp_path)
    assert (found.rounds, found.difference.mean) == (20, pytest.approx(10))


@pytest.mark.parametrize(
    "other",
    [{"num_clients": 7}, {"federation_seed": 5}, {"partition": {"name": "iid"}}, {"participation": {"name": "cyclic"}}],
)
def test_a_claim_about_other_clients_is_an_error(tmp_path, other, expect_error):
    write_run(tmp_path / "runs" / "moon0", (0.1, 0.2, 0.5), **method("moon", seed=0))
    write_run(tmp_path / "runs" / "fedavg0", (0.1, 0.2, 0.4), **method("fedavg", seed=0), **other)
    results.keep(find([tmp_path / "runs"]), tmp_path, "some")
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump([CLAIM]))
    with expect_error("claims.yaml"):
        claims.find_claims(tmp_path)


@pytest.mark.parametrize("text", ["", "a: [", "- {claim: 1}", "- 3"])
def test_a_file_that_is_no_list_of_claims_is_an_error(tmp_path, text, expect_error):
    (tmp_path / "claims.yaml").write_text(text)
    with expect_error():
        claims.find_claims(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"published": "2.0"}, {"rounds": None}, {"first": {"file": "some"}}, {"value": "accuracy_lst"}]
)
def test_a_claim_with_a_wrong_value_is_an_error(tmp_path, changes, expect_error):
    with expect_error("claims.yaml"):
        find_one(tmp_path, (0.5,), (0.4,), **changes)


def test_the_interval_to_the_best_of_several_holds_for_all():
    one, three = (compare_pairs([1, 2, 4], [0, 0, 0], comparisons) for comparisons in (1, 3))
    test = stats.ttest_1samp([1, 2, 4], 0)
    assert (three.low, three.high) == pytest.approx(tuple(test.confidence_interval(1 - 0.05 / 3)))
    assert three.low < one.low < one.high < three.high
    assert three.p == pytest.approx(3 * one.p)


def test_differences_that_are_equal_but_for_kept_digits_have_no_interval():
    assert math.isnan(compare_pairs([1.0, 1.00004, 1.0], [0, 0, 0]).low)
    assert compare_pairs([0.0, 0.00004, 0.0], [0, 0, 0]).p == 1
