"""Further metrics than accuracy: of the global model, of every client, and of personal models."""

import pytest
import torch
from helpers import config_of, read_rows
from reported import method, write_run
from sklearn import metrics as sklearn_metrics
from tiny import TINY_RUN

from contrafed.core.metrics import FUNCTIONS, confusion, scores_of
from contrafed.report import figures, results, tables
from contrafed.report.runs import find
from contrafed.runs.run import run

SMALL_RUN = (*TINY_RUN, "num_rounds=2", "participation=full", "engine=local", "tracker=none")


def test_scores_are_those_of_another_library():
    y, predicted = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 0]), torch.tensor([0, 1, 0, 1, 1, 2, 0, 2, 1, 0])
    counts = confusion(predicted, y, torch.ones(10), 3)
    assert counts.tolist() == [[3, 1, 0], [0, 2, 0], [1, 1, 2]]
    expected = {
        "macro_f1": sklearn_metrics.f1_score(y, predicted, average="macro"),
        "weighted_f1": sklearn_metrics.f1_score(y, predicted, average="weighted"),
        "macro_precision": sklearn_metrics.precision_score(y, predicted, average="macro"),
        "macro_recall": sklearn_metrics.recall_score(y, predicted, average="macro"),
        "mcc": sklearn_metrics.matthews_corrcoef(y, predicted),
    }
    assert scores_of(FUNCTIONS, counts) == pytest.approx(expected)


@pytest.mark.parametrize("classes", [3, 10, 14, 38])
def test_a_perfect_client_has_no_score_above_one(classes):
    """Sums of shares in single precision reach 1.0000001, which a server would reject as a score."""
    assert scores_of(FUNCTIONS, 7 * torch.eye(classes)) == pytest.approx(dict.fromkeys(FUNCTIONS, 1.0))
    assert max(scores_of(FUNCTIONS, 7 * torch.eye(classes)).values()) <= 1


def test_padding_is_in_no_score_and_absent_classes_do_not_count():
    y, predicted = torch.tensor([1, 1, 0]), torch.tensor([1, 2, 0])
    counts = confusion(predicted, y, torch.tensor([1.0, 1.0, 0.0]), 5)
    assert counts.sum() == 2
    # Of the classes 1 and 2, which occur or were named: F1 of 2/3 and 0.
    assert scores_of(["macro_f1"], counts) == pytest.approx({"macro_f1": 1 / 3})
    assert scores_of(["macro_f1"], torch.zeros(5, 5)) == {"macro_f1": 0.0}


def rows_of(folder):
    return read_rows(folder / "metrics.csv")


@pytest.mark.parametrize(("strategy", "scope"), [("fedavg", "global"), ("fedper", "personal")])
def test_runs_record_them_and_nothing_else_changes(tmp_path, strategy, scope):
    named = (*SMALL_RUN, f"strategy={strategy}", "eval_clients=true")
    run(config_of(*named, f"output_dir={tmp_path}/plain"))
    summary = run(config_of(*named, "metrics=[accuracy,macro_f1,mcc]", f"output_dir={tmp_path}/more"))
    rows = rows_of(tmp_path / "more")
    more = [row for row in rows if row["metric"].startswith(("macro_f1", "mcc"))]
    assert [row for row in rows if row not in more] == rows_of(tmp_path / "plain")
    assert {(row["scope"], row["split"]) for row in more} == (
        {("global", "test"), ("global", "clients")} if scope == "global" else {("personal", "test")}
    )
    assert all(-1 <= float(row["value"]) <= 1 for row in more)
    of_clients = [row["metric"] for row in read_rows(tmp_path / "more" / "clients.csv")]
    assert of_clients.count("macro_f1") == of_clients.count("accuracy") > 0
    prefix, last = ("", "final") if scope == "global" else ("personal_", "mean")
    assert {f"{prefix}{name}_{kind}" for name in ("macro_f1", "mcc") for kind in (last, "best")} <= summary.keys()


def test_a_stack_gives_the_scores_that_its_clients_give_alone(tmp_path):
    named = (*SMALL_RUN, "strategy=fedper", "metrics=[macro_f1]")
    for size in (1, 6):
        run(config_of(*named, f"engine.stack_size={size}", f"output_dir={tmp_path}/{size}"))
    alone, stacked = ([r for r in rows_of(tmp_path / str(size)) if r["metric"].startswith("macro_f1")] for size in (1, 6))
    assert [float(r["value"]) for r in alone] == pytest.approx([float(r["value"]) for r in stacked], abs=1e-6)


def test_reports_have_them_in_table_and_figure(tmp_path):
    for name, values in {"fedavg": (0.1, 0.2, 0.4), "moon": (0.1, 0.3, 0.5)}.items():
        more = [(10 * t, "global", "test", "macro_f1", value) for t, value in enumerate(values)]
        more += [(20, "global", "clients", "mcc", 0.25)] if name == "moon" else []
        write_run(tmp_path / "runs" / name, (0.1, 0.6, 0.7), more=more, metrics=["accuracy", "macro_f1", "mcc"], **method(name))
    runs = find([tmp_path / "runs"])
    table = tables.runs_table(runs, "t")
    assert [head for head in table.heads if head.endswith(", last")] == [
        "test accuracy, last", "test macro_f1, last", "clients' mcc, last"
    ]  # fmt: skip
    rows = [dict(zip(table.heads, cells, strict=True)) for cells in table.rows]
    assert {row["method"]: (row["test macro_f1, last"], row["clients' mcc, last"]) for row in rows} == {
        "fedavg": ("40.00", ""), "moon": ("50.00", "25.00")
    }  # fmt: skip
    drawn = figures.of_runs(runs, "t")
    assert "mcc" not in drawn  # of one run alone
    axes = drawn["macro_f1"].axes[0]
    assert "test macro_f1 (%)" in (axes.get_ylabel(), drawn["macro_f1"].get_supylabel())
    assert [30, 50] in [list(line.get_ydata()) for line in axes.lines]
    kept = results.load(results.keep(runs, tmp_path / "results", "kept"))
    assert tables.runs_table(kept, "t").rows == table.rows
