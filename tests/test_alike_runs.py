"""Reports compare like with like: runs of one configuration, on the same data, by the same accuracy, and on equal seeds."""

import pandas as pd
import pytest
from reported import method, write_run

from contrafed import report_command
from contrafed.config.fairness import find_differing_training
from contrafed.report import pages, results, significance
from contrafed.report.groups import group_runs, usable
from contrafed.report.paper import write_paper
from contrafed.report.runs import find
from contrafed.report.statistics import rank_methods, ranks, spearman

# {what differs: configurations of two sweeps of two seeds, the second of which has a key more}
NEWER = {
    "a mapping": (
        {"partition": {"name": "flwr", "arguments": {"alpha": 0.1}}},
        {"partition": {"name": "flwr", "arguments": {"alpha": 0.1, "self_balancing": True}}},
    ),
    "arguments of a network": (
        {"model": {"name": "torch", "args": {}}}, {"model": {"name": "torch", "args": {"width": 64}}},
    ),
    "an own method": (
        {"strategy": {"name": "mine", "server": "fedavg", "local": {"lr": 0.1}}},
        {"strategy": {"name": "mine", "server": "fedavg", "local": {"lr": 0.1}, "tau": 9}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NEWER)
def test_a_key_that_only_some_runs_have_makes_two_rows(tmp_path, what):
    for number, (config, end) in enumerate(zip(NEWER[what], (0.4, 0.8), strict=True)):
        for seed in (0, 1):
            write_run(tmp_path / f"{number}" / f"{seed}", (0.1, end), seed=seed, **config)
    assert [group.numbers("accuracy_final") for group in group_runs(find([tmp_path]))] == [[0.4, 0.4], [0.8, 0.8]]
    for number in (0, 1):
        results.keep(find([tmp_path / f"{number}"]), tmp_path / "results", "x")
    kept = results.load(tmp_path / "results" / "x.csv")
    assert [(run.name, run.number("accuracy_final")) for run in kept] == [
        ("0", 0.4), ("1", 0.4), ("0-2", 0.8), ("1-2", 0.8),
    ]  # fmt: skip


def test_runs_on_other_data_are_rows_of_their_own_and_not_compared(tmp_path):
    """Neither is of the same seed left out as a repetition."""
    for name in ("fedavg", "moon"):
        for seed in (0, 1):
            for data in ("real", "made")[: 1 if name == "moon" else 2]:
                about = {"data_fingerprint": data}
                write_run(tmp_path / f"{name}-{seed}-{data}", (0.1, 0.5), **method(name, seed=seed), summary=about)
    runs, aside = usable(find([tmp_path]))
    assert aside == []
    assert {(group.method, group.setting) for group in group_runs(runs)} == {
        ("fedavg", (("data_fingerprint", "real"),)),
        ("fedavg", (("data_fingerprint", "made"),)),
        ("moon", (("data_fingerprint", "real"),)),
    }
    scores = significance.collect_scores(runs)
    assert significance.build_differences(scores, "t").numbers["data_fingerprint"].tolist() == ["real"]


def test_other_data_of_another_data_set_are_no_difference_of_their_own(tmp_path):
    for name in ("digits", "cifar10"):
        write_run(tmp_path / name, dataset={"name": name}, summary={"data_fingerprint": name})
    write_run(tmp_path / "older", dataset={"name": "digits"}, seed=1)
    assert [group.setting for group in group_runs(find([tmp_path]))] == [
        (("dataset.name", "cifar10"),),
        (("dataset.name", "digits"),),
    ]


def test_methods_without_a_common_accuracy_are_not_compared(tmp_path):
    """FedPer has its clients' accuracy alone, and FedAvg the accuracy on the test set."""
    for seed in (0, 1, 2):
        for name, end, scope in (
            ("fedavg", 0.5 + seed / 100, ("global", "test")), ("moon", 0.6 + seed / 50, ("global", "test")),
            ("fedper", 0.9, ("personal", "test")),
        ):  # fmt: skip
            write_run(tmp_path / f"{name}-{seed}", (0.1, end), **method(name, seed=seed), scope=scope)
    runs = find([tmp_path])
    scores = significance.collect_scores(runs)
    assert (scores.said, scores.methods) == ("test accuracy", ["moon", "fedavg"])
    files = pages.write(runs, tmp_path / "report", "t")
    (line,) = [line for line in files[0].read_text().splitlines() if "eval_clients=true" in line]
    assert "fedper" in line
    rows = {line.split(" | ")[0]: line for line in files[0].read_text().splitlines()}
    assert rows["| fedper"].endswith("|  |  |  |")  # no rounds to FedAvg's other accuracy
    assert not rows["| moon"].endswith("|  |  |  |")
    write_paper(runs, tmp_path / "report", 3.3)
    assert "eval\\_clients=true" in (tmp_path / "report" / "paper-methods.tex").read_text()


def test_each_setting_is_compared_by_the_accuracy_that_its_methods_have(tmp_path):
    for pattern, scope in (("full", ("global", "test")), ("cyclic", ("personal", "test"))):
        for name, end in (("fedavg", 0.5), ("moon", 0.6)):
            for seed in (0, 1):
                changes = method(name, seed=seed, participation={"name": pattern})
                write_run(tmp_path / f"{name}-{pattern}-{seed}", (0.1, end), **changes, scope=scope)
    scores = significance.collect_scores(find([tmp_path]))
    assert scores.table.notna().all(axis=None)
    assert scores.said == "clients' accuracy or test accuracy"
    text = pages.write(find([tmp_path]), tmp_path / "report", "t")[0].read_text()
    assert "eval_clients" not in text
    lines = [line for line in text.splitlines() if line.startswith("| moon")]
    assert all(line.count("50.00") == 1 for line in lines)


def test_the_best_is_that_of_equal_seeds(tmp_path):
    """MOON has one seed, an easy one, on which FedProx is better."""
    for seed, end in enumerate((0.8, 0.6, 0.62)):
        for name, more in (("fedavg", 0.0), ("fedprox", 0.1), ("moon", 0.02))[: 2 if seed else 3]:
            write_run(tmp_path / f"{name}-{seed}", (0.1, end + more + seed / 1000), **method(name, seed=seed))
    scores = significance.collect_scores(find([tmp_path]))
    assert significance.compare_to_best(scores, "") == {"fedavg": False, "fedprox": True, "moon": False}
    table = significance.build_method_table(scores, "t")
    cells = dict(table.rows)
    assert cells["moon"] == "82.00 (1 of 3)"
    assert cells["fedprox"].startswith("**77.")


def test_methods_are_ranked_on_equal_seeds():
    rows = [(setting, seed, 50 + 10 * seed, 51 + 10 * seed, 52 + 10 * seed) for setting in "12" for seed in (0, 1)]
    table = pd.DataFrame(rows, columns=["setting", "seed", "low", "middle", "high"]).set_index(["setting", "seed"])
    table.loc[("1", 1), ["middle", "high"]] = float("nan")  # low has the higher mean of all its seeds
    scores = significance.Scores("x", ("a",), {"1": ("1",), "2": ("2",)}, table, None)
    assert significance.rank_scores(scores).ranks == {"high": 1, "middle": 2, "low": 3}


def test_means_of_equal_sums_share_a_rank():
    first, second = 86.66666666666667, 86.66666666666666  # of 403 and 377, and of 422 and 358 of 450 images
    assert rank_methods({"a": [first, 5.0], "b": [second, 5.0], "c": [1.0, 1.0]}).ranks == {"a": 1.5, "b": 1.5, "c": 3}
    assert ranks([first, second, 1.0]) == [1.5, 1.5, 3]
    assert spearman([first, second, 1.0], [2.0, 2.0, 1.0]) == (pytest.approx(1), 3)


def test_training_that_differs_within_a_setting_is_found():
    def compared(alpha, lr):
        return {"partition": {"alpha": alpha}, "strategy": {"local": {"lr": lr}}}

    runs = [("fedavg", compared(0.1, 0.1)), ("fedavg", compared(0.5, 0.05)), ("moon", compared(0.1, 0.05))]
    assert find_differing_training([*runs, ("moon", compared(0.5, 0.1))]).keys() == {"strategy.local.lr"}
    same = [(name, config) for _, config in runs[:2] for name in ("fedavg", "moon")]
    assert find_differing_training(same) == {}


def test_a_report_names_what_it_leaves_out(tmp_path):
    for name in ("fedavg", "moon"):
        for seed in (0, 1):
            summary = {"status": "diverged", "rounds": 20} if (name, seed) == ("moon", 1) else None
            write_run(tmp_path / "runs" / f"{name}-{seed}", **method(name, seed=seed), summary=summary)
    assert report_command.main([str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 0
    assert "* moon-1: diverged" in (tmp_path / "report" / "runs.md").read_text()
