"""Rounds and MiB to FedAvg's last accuracy, in the setting of each row."""

import sys
from pathlib import Path

from reported import method, write_run

from contrafed.report import tables
from contrafed.report.groups import group_runs
from contrafed.report.runs import find

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "generate"))
import results


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
                tmp_path / f"moon-{pattern}-{weight}", (0.1, 0.5, 0.6), strategy=strategy, **here, evaluate="after_training"
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
    write_run(tmp_path / "moon", strategy=strategy, evaluate="after_training")
    write_run(tmp_path / "fedavg", evaluate_after="download")
    write_run(tmp_path / "elsewhere", evaluate_after="download", participation__name="cyclic")
    own, compared = results.beside_fedavg("moon", group_runs(find([tmp_path])))
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
