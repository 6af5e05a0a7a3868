"""Our runs and the papers' tables: the cell of a run, differences, ranks, correlations, and missing cells."""

import math
import sys
from pathlib import Path

import pytest
from messages import ROOT
from reported import method, write_run

from contrafed.report import published, results, results_pages, tables
from contrafed.report.groups import group_runs
from contrafed.report.runs import find

sys.path.insert(0, str(ROOT / "docs" / "generate"))
import results as generated

CELLS = [
    {"metric": metric, "setting": "bernoulli", "value": f"{prefix}accuracy_top5_mean", "std": None}
    for metric, prefix in (("train_accuracy", "train_"), ("test_accuracy", ""))
]


def pmfl(name, **more):
    row = {"paper": "pmfl", "table": "I", "figure": None, "dataset": "SVHN", "method": name, "setting": "bernoulli"}
    told = {"changed": [], "scale": None, "settings": "code"}
    return method(name.partition("/")[0], published={**row, "cells": CELLS, "plot": None}, **told, **more)


def test_every_table_is_there(expect_error):
    tables_of = {
        paper: published.load(paper)["table"].nunique() for paper in ("fedcosr", "fedcrl", "fedrcl", "mpfedcon", "pmfl")
    }
    assert tables_of == {"fedcosr": 2, "fedcrl": 2, "fedrcl": 6, "mpfedcon": 4, "pmfl": 5}
    row = published.load("pmfl").query("table == 'I' and dataset == 'SVHN' and method == 'pmfl' and metric == 'test_accuracy'")
    assert row["value"].iloc[0] == 87.47
    with expect_error("paper"):
        published.load("pmfk")


def test_a_column_by_hand(tmp_path):
    # Test accuracies of the best five of two seeds of pmfl (60, 64), one of fedau and mifa, 70 and 50.
    ours = {("pmfl", 0): 0.60, ("pmfl", 1): 0.64, ("fedau", 0): 0.70, ("mifa", 0): 0.50}
    for (name, seed), accuracy in ours.items():
        write_run(tmp_path / f"{name}-{seed}", (0.1, accuracy), seed=seed, **pmfl(name))
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.title == "PMFL, Table I"
    cells = comparison.cells.query("metric == 'test_accuracy' and dataset == 'SVHN' and setting == 'bernoulli'").set_index(
        "method"
    )
    assert cells.loc["pmfl", "ours"] == pytest.approx(62)
    assert cells.loc["pmfl", "ours_std"] == pytest.approx(4 / math.sqrt(2))
    assert cells.loc["pmfl", "seeds"] == 2
    theirs = published.load("pmfl").query(
        "table == 'I' and metric == 'test_accuracy' and dataset == 'SVHN' and setting == 'bernoulli'"
    )
    printed = theirs.set_index("method")["value"]
    assert cells.loc["pmfl", "difference"] == pytest.approx(62 - printed["pmfl"])
    # The paper has pmfl above mifa above fedau or another way: both orders among these three methods alone.
    assert cells.loc[["fedau", "pmfl", "mifa"], "rank"].tolist() == [1, 2, 3]
    order = sorted(["fedau", "pmfl", "mifa"], key=lambda name: -printed[name])
    assert cells.loc[order, "paper_rank"].tolist() == [1, 2, 3]
    ((_, rho, count),) = [entry for entry in comparison.correlations() if entry[0][2] == "test_accuracy"]
    places = [order.index(name) for name in ("fedau", "pmfl", "mifa")]
    assert count == 3
    assert rho == pytest.approx(1 - 6 * sum((place - i) ** 2 for i, place in enumerate(places)) / (3 * 8))
    # fedvarp is empty and named, and so is every other data set. No run evaluated training images.
    assert math.isnan(cells.loc["fedvarp", "ours"])
    no_run, silent = tables.missing_line(comparison).split("3 have a run without this number: ")
    assert no_run.startswith("Of the paper's 144 cells 138 have no run here: ")
    assert "SVHN bernoulli test_accuracy (fedvarp, fedhyper, fedppo)" in no_run
    assert "CIFAR10 cyclic test_accuracy (all)" in no_run
    assert silent == "SVHN bernoulli train_accuracy (pmfl, mifa, fedau)."
    text = tables.comparison_text(comparison)
    assert "| pmfl | 62.00 ± 2.83 (87.47) |" in text
    assert "(3 cells)" in text
    latex = tables.comparison_latex(comparison)
    assert r"pmfl & 62.00 $\pm$ 2.83 (87.47) \\" in latex
    assert r"SVHN & bernoulli & test\_accuracy & pmfl & 62.00 $\pm$ 2.83 & 2 & 87.47 & -25.47 & 2 & 1 \\" in latex
    assert r"SVHN bernoulli test\_accuracy: " in latex
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 2


def test_what_is_changed_or_small_stands_apart(tmp_path):
    for name, more in {"whole": {}, "short": {"changed": ["num_rounds=50"]}, "small": {"scale": "small"}}.items():
        write_run(tmp_path / name, **{**pmfl("pmfl"), **more})
    found = published.compare(find([tmp_path]))
    assert sorted(c.title for c in found) == ["PMFL, Table I", "PMFL, Table I (num_rounds=50)", "PMFL, Table I (scale=small)"]
    assert len({c.stem for c in found}) == 3


def test_each_settings_of_a_paper_are_another_table(tmp_path):
    for name, accuracy in (("code", 0.5), ("printed", 0.75)):
        write_run(tmp_path / name, (0.1, accuracy), **pmfl("pmfl") | {"settings": name})
    found = {c.title: c.cells["ours"].dropna().tolist() for c in published.compare(find([tmp_path]))}
    assert found == {"PMFL, Table I": [50], "PMFL, Table I (settings=printed)": [75]}
    assert len({c.stem for c in published.compare(find([tmp_path]))}) == 2


def test_runs_from_before_the_key_have_the_settings_of_then(tmp_path):
    rows = [("pmfl", "I", "SVHN", "pmfl"), ("fedrcl", "1", "CIFAR-10", "fedrcl")]
    for paper, table, dataset, name in rows:
        row = {"paper": paper, "table": table, "dataset": dataset, "method": name, "cells": CELLS}
        write_run(tmp_path / name, **method(name, published=row))
    kept = results.load(results.keep(find([tmp_path]), tmp_path / "results", "kept"))
    for runs in (find([tmp_path]), kept):
        assert {c.title for c in published.compare(runs)} == {"PMFL, Table I (settings=printed)", "FedRCL, Table 1"}


def test_two_configurations_are_never_one_cell(tmp_path):
    for number, (seed, rate) in enumerate(((0, 0.1), (1, 0.1), (0, 0.5), (2, 0.5))):
        local = {"strategy": {"name": "pmfl", "server": "fedavg", "local": {"lr": rate}}}
        write_run(tmp_path / str(number), (0.1, rate), **pmfl("pmfl") | local | {"seed": seed})
    write_run(tmp_path / "other", (0.1, 0.3), **pmfl("mifa"))
    (comparison,) = published.compare(find([tmp_path]))
    ours = comparison.cells.dropna(subset="ours")
    assert sorted(map(tuple, ours[["setting", "method", "ours", "seeds"]].to_numpy().tolist())) == [
        ("bernoulli", "mifa", 30, 1),
        ("bernoulli local.lr=0.1", "pmfl", 10, 2),
        ("bernoulli local.lr=0.5", "pmfl", 50, 2),
    ]
    assert comparison.aside == ()


def test_a_table_of_an_own_experiment_names_it(tmp_path):
    for name in ("pmfl/table1", "mine"):
        write_run(tmp_path / name, **pmfl("pmfl") | {"experiment": name})
    assert sorted(c.title for c in published.compare(find([tmp_path]))) == ["PMFL, Table I", "PMFL, Table I (experiment=mine)"]


def test_the_order_of_what_is_changed_makes_no_other_table(tmp_path):
    for seed, changed in enumerate((["num_rounds=50", "model=mlp"], ["model=mlp", "num_rounds=50"])):
        write_run(tmp_path / str(seed), **pmfl("pmfl") | {"changed": changed, "seed": seed})
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.title == "PMFL, Table I (model=mlp, num_rounds=50)"


def test_of_two_runs_of_one_cell_and_seed_the_last_counts_and_the_other_is_named(tmp_path):
    for name, accuracy in (("a", 0.5), ("b", 0.75)):
        write_run(tmp_path / name, (0.1, accuracy), **pmfl("pmfl"))
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.cells.dropna(subset="ours")[["ours", "seeds"]].to_numpy().tolist() == [[75, 1]]
    assert "Not counted: a: b is of the same cell and seed." in tables.comparison_text(comparison)


def test_where_the_data_lie_makes_no_other_table(tmp_path):
    for seed, place in enumerate(("/here", "/there")):
        write_run(tmp_path / str(seed), **pmfl("pmfl") | {"changed": [f"dataset.path={place}/c.npz"], "seed": seed})
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.title == "PMFL, Table I (dataset.path=c.npz)"


def test_a_run_that_did_not_end_fills_no_cell(tmp_path):
    write_run(tmp_path / "half", **pmfl("pmfl"), summary={"status": "interrupted"})
    assert published.compare(find([tmp_path])) == []
    write_run(tmp_path / "whole", **pmfl("scaffold"))
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.cells.dropna(subset="ours")["method"].tolist() == ["scaffold"]


def test_a_method_that_the_paper_lacks_has_no_paper_value(tmp_path):
    write_run(tmp_path / "a", **pmfl("scaffold"))
    (comparison,) = published.compare(find([tmp_path]))
    assert "| scaffold | 66.67 |" in tables.comparison_table(comparison).markdown
    assert len(comparison.both) == 0
    assert comparison.correlations()[0][2] == 0


def fedcrl(name, scope, value="personal_accuracy_best"):
    cell = {"metric": "personal_accuracy", "setting": "practical beta=0.1 N=20", "value": value, "std": f"{value}_std"}
    row = {"paper": "fedcrl", "table": "II", "dataset": "CIFAR-10", "method": name, "setting": cell["setting"], "cells": [cell]}
    return {**method(name), "published": row, "scope": scope, "spread": (0.5, 0.2, 0.1, 0.3)}


def test_deviation_over_clients_at_the_best_round(tmp_path):
    write_run(tmp_path / "own", **fedcrl("fedcrl", ("personal", "test")))
    write_run(tmp_path / "global", **fedcrl("fedavg", ("global", "clients")))
    write_run(tmp_path / "clients", **fedcrl("fedprox", ("global", "clients"), "clients_accuracy_best"))
    (comparison,) = published.compare(find([tmp_path]))
    both = comparison.both.set_index("method")
    for name in ("fedcrl", "fedavg", "fedprox"):
        assert (both.loc[name, "ours"], both.loc[name, "ours_client_std"]) == (pytest.approx(80), pytest.approx(10))
    assert both.loc["fedcrl", "paper_std"] > 0
    assert "our deviation over clients" in tables.comparison_text(comparison)


def to_target(name, accuracies, folder, seed=0):
    cells = [
        {"metric": metric, "setting": "clients=100 classes=5", "value": value, "std": None}
        for metric, value in {
            "rounds": "rounds_to_target",
            "speedup": "speedup_to_target",
            "traffic_mb": "traffic_to_target",
        }.items()
    ]
    row = {"paper": "mpfedcon", "table": "3", "dataset": "CIFAR-10", "method": name, "setting": "", "cells": cells}
    scope = ("global", "clients") if name == "fedavg" else ("personal", "test")
    return write_run(folder / f"{name}-{seed}", accuracies, scope=scope, seed=seed, **method(name, published=row))


def test_rounds_speedup_and_traffic_to_fedavgs_last_accuracy(tmp_path):
    to_target("fedavg", (0.1, 0.55, 0.4, 0.5, 0.5), tmp_path)  # its last is 0.5, of round 40
    to_target("mpfedcon", (0.6, 0.3, 0.5, 0.7, 0.7), tmp_path)  # reached in round 20
    to_target("fedrep", (0.6, 0.3, 0.4, 0.4, 0.4), tmp_path)  # never
    (comparison,) = published.compare(find([tmp_path]))
    ours = comparison.cells.query("dataset == 'CIFAR-10'").set_index(["metric", "method"])["ours"]
    assert ours["rounds", "fedavg"] == 40
    assert ours["speedup", "fedavg"] == 1
    assert (ours["rounds", "mpfedcon"], ours["speedup", "mpfedcon"]) == (20, 2)
    # Two clients upload 2 MiB a round together, one of them 1 MiB.
    assert ours["traffic_mb", "mpfedcon"] == pytest.approx(20)
    for metric in ("rounds", "speedup", "traffic_mb"):  # fewer are better, except speed-ups. None is last
        ranks = comparison.cells.query(f"metric == '{metric}' and dataset == 'CIFAR-10'").set_index("method")["rank"]
        assert ranks[["mpfedcon", "fedavg", "fedrep"]].tolist() == [1, 2, 3]


def test_a_target_that_was_not_reached_is_a_dash_and_no_missing_run(tmp_path):
    to_target("fedavg", (0.1, 0.5), tmp_path)
    to_target("fedavg", (0.1, 0.2), tmp_path, seed=1)
    to_target("fedrep", (0.1, 0.4), tmp_path)
    to_target("fedprox", (0.1, 0.3), tmp_path)
    to_target("fedprox", (0.1, 0.1, 0.3), tmp_path, seed=1)  # gets there by one seed of two
    (comparison,) = published.compare(find([tmp_path]))
    cells = {(cell["metric"], cell["method"]): cell for cell in comparison.both.to_dict("records")}
    assert tables.beside(cells["rounds", "fedrep"]) == "- (58.00)"
    assert tables.beside(cells["speedup", "fedrep"]) == "- (3.40)"
    assert (cells["rounds", "fedprox"]["ours"], cells["speedup", "fedprox"]["ours"], cells["rounds", "fedprox"]["seeds"]) == (
        20,
        0.5,
        1,
    )
    assert tables.beside(cells["rounds", "fedprox"]).startswith("20.00 (1 of 2) (")
    assert "inf" not in tables.comparison_text(comparison)
    missing = tables.missing_line(comparison)
    assert "CIFAR-10 clients=100 classes=5 rounds (mpfedcon)" in missing
    assert "fedrep" not in missing


def test_without_fedavg_there_is_nothing_to_reach(tmp_path):
    to_target("mpfedcon", (0.1, 0.6), tmp_path)
    (comparison,) = published.compare(find([tmp_path]))
    assert "3 have a run without this number: CIFAR-10 clients=100 classes=5 rounds (mpfedcon)" in tables.missing_line(
        comparison
    )


def test_what_no_run_measures_is_no_missing_run(tmp_path):
    cell = {"metric": "personal_accuracy", "setting": "gradient leakage", "value": "accuracy_final", "std": None}
    row = {"paper": "mpfedcon", "table": "4", "dataset": "", "method": "original", "setting": "", "cells": [cell]}
    write_run(tmp_path / "a", **method("fedavg", published=row))
    (comparison,) = published.compare(find([tmp_path]))
    assert set(comparison.cells["metric"]) == {"personal_accuracy"}
    said = tables.missing_line(comparison)
    assert said.startswith("Of the paper's 6 cells 5 have no run here: gradient leakage personal_accuracy (gaussian_1e-4, ")
    assert said.endswith(". What `defended` says is measured by `python -m contrafed.report.leakage`.")


def test_where_columns_have_one_method_settings_are_ranked(tmp_path, monkeypatch):
    """PMFL's Table IV varies C and beta. The order of three settings is the paper's, except for the last two."""
    ours = {"bernoulli C=50 beta=0.4": 0.8, "bernoulli C=50 beta=0.1": 0.6, "cyclic C=20 beta=0.1": 0.7}  # 88.37, 87.47, 87.02
    for number, (setting, accuracy) in enumerate(ours.items()):
        cell = {"metric": "test_accuracy", "setting": setting, "value": "accuracy_final", "std": None}
        row = {"paper": "pmfl", "table": "IV", "dataset": "SVHN", "method": "pmfl", "setting": setting, "cells": [cell]}
        write_run(tmp_path / str(number), (0.1, accuracy), **method("pmfl", published=row))
    (comparison,) = published.compare(find([tmp_path]))
    both = comparison.both.set_index("setting").loc[list(ours)]
    assert both["rank"].tolist() == [1, 3, 2]
    assert both["paper_rank"].tolist() == [1, 2, 3]
    assert comparison.correlations() == [(("SVHN", "test_accuracy", "pmfl"), pytest.approx(0.5), 3)]
    assert "SVHN test_accuracy pmfl: 0.50 (3 cells)" in tables.comparison_text(comparison)
    # Nor is what is ranked one line of a page, as one method is that is ranked among nothing.
    results.keep(find([tmp_path]), tmp_path / "results", "tried")
    results_pages.write_results_pages(tmp_path)
    assert "| SVHN test accuracy PMFL | 0.50 | 3 |" in (tmp_path / "docs" / "results" / "tried.md").read_text()


def test_a_paper_s_table_with_one_method_of_ours_is_a_row_for_each_cell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [{"setting": "bernoulli", "metric": f"{part}_accuracy", "value": "accuracy_final"} for part in ("test", "train")]
    for name, lr, count in (("pmfl", [], 1), ("fedau", [], 1), ("mifa", ["server_lr=2"], 1), ("fedvarp", ["server_lr=3"], 2)):
        published = {"paper": "pmfl", "table": "I", "dataset": "SVHN", "method": name, "cells": cells[:count]}
        write_run(tmp_path / "runs" / name, **method(name, published=published, changed=lr, settings="code"))
    results.keep(find([tmp_path / "runs"]), tmp_path / "results", "tried")
    results.keep(find([write_run(tmp_path / "own", (0.1, 0.5))]), tmp_path / "results", "own")
    results_pages.write_results_pages(tmp_path)
    page = Path("docs/results/tried.md").read_text()
    heads = [line for line in page.splitlines() if line.startswith("#")]
    columns = ["### SVHN bernoulli, test accuracy"]
    correlation = "### Spearman's correlation with the published values"
    assert heads == ["# tried", "## PMFL, Table I", *columns, correlation, "## Single methods", "## Figures", "## All runs"]
    assert "| PMFL | 70.00 | 87.47 | -17.47 | " in page
    assert "| PMFL, Table I | server_lr=2 | SVHN bernoulli, test accuracy | MIFA | 70.00 | " in page
    cells = [line for line in page.splitlines() if " | server_lr=3 | " in line]
    assert [line.split(" | ")[2] for line in cells] == ["SVHN bernoulli, train accuracy", "SVHN bernoulli, test accuracy"]
    assert "## Single methods" not in Path("docs/results/own.md").read_text()


def targets(folder, *keys):
    """Return {the row's cells under ``keys``: FedAvg's last, rounds and MiB to it}."""
    table = tables.runs_table(find([folder]), "t")
    return {tuple(row[table.heads.index(key)] for key in keys): row[-3:] for row in table.rows}


def test_rounds_are_counted_to_fedavgs_last_in_the_same_setting(tmp_path):
    """FedAvg's last accuracy differs under another pattern."""
    # A method's own keys and its evaluation do not change the setting.
    for pattern, last in (("full", 0.7), ("cyclic", 0.4)):
        here = {"participation": {"name": pattern}}
        write_run(tmp_path / f"fedavg-{pattern}", (0.1, 0.3, last), **here, evaluate_after="download")
        for weight in (1, 2):
            strategy = {**method("moon")["strategy"], "contrast_weight": weight}
            write_run(
                tmp_path / f"moon-{pattern}-{weight}",
                (0.1, 0.5, 0.6),
                strategy=strategy,
                **here,
                evaluate_after="local_training",
            )
    write_run(tmp_path / "alone", participation={"name": "uniform"}, **method("moon"))
    found = targets(tmp_path, "method", "participation", "contrast_weight")
    assert found["fedavg", "full", "-"] == ("70.00", "20", "12")
    assert found["fedavg", "cyclic", "-"] == ("40.00", "20", "12")
    for weight in ("1", "2"):
        assert found["moon", "full", weight] == ("70.00", "-", "-")
        assert found["moon", "cyclic", weight] == ("40.00", "10", "6")
    assert found["moon", "uniform", "1"] == ("", "", "")  # it does not say its weight: today's default


def test_fedavg_stands_beside_a_method_with_keys_of_its_own(tmp_path):
    strategy = {**method("moon")["strategy"], "contrast_weight": 2}
    write_run(tmp_path / "moon", strategy=strategy, evaluate_after="local_training")
    write_run(tmp_path / "fedavg", evaluate_after="download")
    write_run(tmp_path / "elsewhere", evaluate_after="download", participation__name="cyclic")
    own, compared = generated.beside_fedavg("moon", group_runs(find([tmp_path])))
    assert [group.method for group in own] == ["moon"]
    assert [(group.method, dict(group.setting)["participation.name"]) for group in compared] == [
        ("fedavg", "full"),
        ("moon", "full"),
    ]


def test_what_fedavg_itself_varies_is_a_setting(tmp_path):
    for rate, last in ((0.1, 0.7), (0.01, 0.2)):
        strategy = {"server": "fedavg", "local": {"lr": rate}}
        write_run(tmp_path / f"fedavg-{rate}", (0.1, last), strategy={"name": "fedavg", **strategy})
        write_run(tmp_path / f"moon-{rate}", (0.1, 0.5), strategy={"name": "moon", **strategy})
    found = targets(tmp_path, "method", "local.lr")
    assert found["moon", "0.1"] == ("70.00", "-", "-")
    assert found["moon", "0.01"] == ("20.00", "10", "6")


def test_a_column_of_methods_with_other_seeds_says_so(tmp_path):
    for name, seed in (("pmfl", 0), ("pmfl", 1), ("fedau", 1)):
        write_run(tmp_path / f"{name}-{seed}", (0.1, 0.6), seed=seed, **pmfl(name))
    (comparison,) = published.compare(find([tmp_path]))
    assert comparison.has_other_seeds
    assert published.OTHER_SEEDS in tables.comparison_text(comparison)
    ours = comparison.both
    table = results_pages.build_column_table(ours, "title")
    assert {row[0]: row[table.heads.index("seeds")] for row in table.rows} == {"PMFL": "2", "FedAU": "1"}
    write_run(tmp_path / "fedau-0", (0.1, 0.6), seed=0, **pmfl("fedau"))
    (comparison,) = published.compare(find([tmp_path]))
    assert not comparison.has_other_seeds
