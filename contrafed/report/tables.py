"""Write tables as Markdown, CSV and LaTeX: all runs of a folder, two runs side by side, and ours with a paper's."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from contrafed.report.beside import Beside
from contrafed.report.csv_cells import escape_table
from contrafed.report.groups import Group, format_value, group_runs, number_of, short
from contrafed.report.latex import escape_tex, float_tex
from contrafed.report.measures import Measures, choose_measures, use_measure
from contrafed.report.published import COLUMN, MEASURED_BY, OTHER_SEEDS, UNREACHED_VALUES, Comparison, find_ranking_columns
from contrafed.report.runs import SIMULATED_TIME, FinishedRun, Points, accuracy_of, beside_accuracy_of, ending_accuracy_of, flat
from contrafed.report.statistics import first_at, over_seeds

MIB = 2**20
# Below a table of runs.
READ = """
Numbers are mean ± sample standard deviation over seeds, scores in percent. *Clients' accuracy* is weighted by the clients'
test examples, its *std over clients* is not. *FedAvg's last* is FedAvg's last accuracy in
the same setting. Keys that an experiment sets for single methods do not belong to the setting. *Rounds to* and *MiB to* are
means over the seeds that reach this accuracy. If some seeds do not, the number of those that do is in brackets. "-": no seed
reaches it.
"""


@dataclass(frozen=True)
class Table:
    """Cells as text, and the same as numbers for the CSV."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: pd.DataFrame

    @property
    def markdown(self) -> str:
        """The table in Markdown, columns of numbers aligned to the right."""
        lines = [[head.replace("|", "\\|") for head in self.heads]]
        lines.append(["---:" if right else "---" for right in self._right])
        lines += [[cell.replace("|", "\\|") for cell in row] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    @property
    def plain(self) -> str:
        """The table for a terminal: columns padded to their width."""
        widths = [max(map(len, column)) for column in zip(self.heads, *self.rows, strict=True)]
        places = [f"{'>' if right else '<'}{width}" for width, right in zip(widths, self._right, strict=True)]
        lines = ["  ".join(map(format, row, places)) for row in (self.heads, *self.rows)]
        return "".join(f"{line.rstrip()}\n" for line in lines)

    @property
    def latex(self) -> str:
        """The table in LaTeX, for the packages booktabs and graphicx."""
        align = "".join("r" if right else "l" for right in self._right)
        rows = [" & ".join(map(escape_tex, row)) + r" \\" for row in (self.heads, *self.rows)]
        return float_tex("table", self.title, align, rows[:1], rows[1:])

    @property
    def _right(self) -> list[bool]:
        """Which columns are numbers, which are aligned to the right."""
        return [_numeric([row[i] for row in self.rows]) for i in range(len(self.heads))]

    @property
    def csv(self) -> str:
        """The numbers, unrounded. A missing number is an empty cell."""
        return escape_table(self.numbers).to_csv(index=False, lineterminator="\n")


def _numeric(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in ("", "-")]
    return bool(filled) and all(cell.lstrip("+-(*< ").replace(",", "")[:1].isdigit() for cell in filled)


def figure_of(mean: float, deviation: float = math.nan, digits: int = 2) -> str:
    """Return ``12.34 ± 0.56``, without the standard deviation if there is none, and an empty cell for NaN."""
    if math.isnan(mean):
        return ""
    text = f"{mean:,.{digits}f}"
    return text if math.isnan(deviation) else f"{text} ± {deviation:,.{digits}f}"


# Columns of a table of runs: head, key of ``FinishedRun.number``, its unit, digits.
SCORES = (
    ("test accuracy, last", "accuracy_final", 100, 2),
    ("test accuracy, mean of the best five", "accuracy_top5_mean", 100, 2),
    ("training accuracy, mean of the best five", "train_accuracy_top5_mean", 100, 2),
    ("clients' accuracy, last", "personal_accuracy_mean", 100, 2),
    ("std over clients", "personal_accuracy_std", 100, 2),
)
COSTS = (
    ("MiB a client and round", "mib_per_client", 1, 3),
    ("seconds", "seconds", 1, 0),
    ("simulated seconds", "simulated_time", 1, 0),
    ("lost seconds of late clients", "lost_seconds", 1, 0),
)

# Heads of a table of runs that no key has.
FIXED_HEADS = ("method", "seeds", "rounds", *(head for head, *_ in (*SCORES, *COSTS)))


def find_heads(keys: Sequence[str]) -> dict[str, str]:
    """Return {dotted key: head of its column}: ``short``, or the whole key if another column has that head."""
    heads = list(map(short, keys))
    return {key: key if head in FIXED_HEADS or heads.count(head) > 1 else head for key, head in zip(keys, heads, strict=True)}


def fedavgs_last(found: Sequence[Group], measures: Measures) -> list[float | None]:
    """Return for each group FedAvg's last accuracy in the same setting (``Beside``), the mean over seeds, or None.

    It is None for a group that lacks the accuracy by which methods are compared.
    """
    ends: list[tuple[Group, list[float]]] = []
    for group in found:
        points = measures.points.get(id(group))
        if group.method == "fedavg" and group.until is None and points is not None:
            ends.append((group, [points(run)[-1][1] for run in group.runs if points(run)]))
    place = Beside([group for group in found if group.until is None], "fedavg").setting
    last = [[value for other, values in ends if place(other) == place(group) for value in values] for group in found]
    return [
        over_seeds(values)[0] if values and id(group) in measures.points else None
        for group, values in zip(found, last, strict=True)
    ]


def runs_table(runs: Sequence[FinishedRun], title: str, target: float | None = None) -> Table:
    """Return a row for each group of runs that differ only in their seed, the best first within the other varied keys.

    Numbers are mean ± standard deviation over seeds. Rounds, and MiB up and down over all clients, are counted until a seed's
    accuracy reaches ``target``, a fraction. They are means over the seeds that reach it, "-" if none does, and empty without a
    target. The default is the runs' ``target_accuracy``, of the accuracy that ends them. Without one it is FedAvg's last
    accuracy in the same setting (``fedavgs_last``), which has a column. A number that not all seeds have shows how many do.
    """
    found = group_runs(runs)
    keys = find_heads([key for key, _ in found[0].setting])
    measures = choose_measures(found, "fedavg") if target is None else use_measure(found, *accuracy_of(runs))
    if target is None and len(own := {run.config.get("target_accuracy") for run in runs}) == 1 and own != {None}:
        target, measures = own.pop(), use_measure(found, *ending_accuracy_of(runs))
    further = []
    for name in beside_accuracy_of(runs):
        further += [(f"test {name}, last", f"global/test/{name}", 100, 2), (f"clients' {name}, last", f"own/{name}", 100, 2)]
    columns = (*SCORES, *further, *COSTS)
    targets = fedavgs_last(found, measures) if target is None else [target] * len(found)
    goal = "FedAvg's last" if target is None else f"{100 * target:.4g} % {measures.said}"
    extra = [(f"{goal} {measures.said}", 2)] if target is None else []
    timed = ["simulated seconds"] if all(run.points(*SIMULATED_TIME) for run in runs) else []
    costs = [(f"{cost} to {goal}", 0) for cost in ("rounds", "MiB", *timed)]
    extra = [*extra, *costs] if any(reach is not None for reach in targets) else []
    rows: list[dict[str, Any]] = []
    for group, reach in zip(found, targets, strict=True):
        row: dict[str, Any] = {"method": group.method, **{keys[key]: value for key, value in group.setting}}
        row["seeds"] = len(group.runs)
        row["rounds"] = _rounds(group)
        for head, key, unit, _ in columns:
            values = [_mib(run) for run in group.runs] if key == "mib_per_client" else group.numbers(key)
            row[head], row[f"{head}, std"] = over_seeds([unit * value for value in values])
            if len(known := [value for value in values if not math.isnan(value)]) < len(values):
                row[f"{head}, seeds"] = len(known)
        if reach is not None:
            spent, row["seeds that reach it"] = _to_target(group, reach, measures.points[id(group)], bool(timed))
            row |= {head: value for (head, _), value in zip(extra, [100 * reach, *spent][-len(extra) :], strict=True)}
        rows.append(row)
    best = [head for head, *_ in SCORES[:4:3]]
    rows.sort(key=lambda row: ([_order(row[head]) for head in keys.values()], [-_or_zero(row[head]) for head in best]))
    heads = [(head, digits) for head, *_, digits in columns]
    return _table(title, rows, list(keys.values()), heads, extra)


def _rounds(group: Group) -> str:
    """Return the fewest and the most rounds of a group's runs, and the planned number if they differ."""
    done, planned = sorted({int(run.summary["rounds"]) for run in group.runs}), int(group.runs[0].config["num_rounds"])
    said = f"{done[0]} to {done[-1]}" if len(done) > 1 else str(done[0])
    return said if done == [planned] else f"{said} of {planned}"


def describe_scale(runs: Sequence[FinishedRun]) -> str:
    """Return reduced scale and replaced images of runs, and how many runs have them if not all do. Empty if none do."""
    said = Counter(f"scale={run.config['scale']}" for run in runs if run.config.get("scale"))
    said += Counter(f"{run.summary['stand_in']} images" for run in runs if run.summary.get("stand_in"))
    shares = {text: "" if count == len(runs) else f" in {count} of {len(runs)} runs" for text, count in said.items()}
    return ", ".join(f"{text}{shares[text]}" for text in sorted(said))


def format_title(runs: Sequence[FinishedRun], title: str) -> str:
    """Return a title that names reduced scale and replaced images."""
    said = describe_scale(runs)
    return f"{title} ({said})" if said else title


def _table(
    title: str, rows: list[dict[str, Any]], keys: list[str], heads: list[tuple[str, int]], extra: list[tuple[str, int]]
) -> Table:
    """Build the table. Empty ``heads``, which are (column, digits), are dropped. ``extra`` are the columns of targets."""
    numbers = pd.DataFrame(rows).dropna(axis=1, how="all")
    heads = [(head, digits) for head, digits in heads if head in numbers] + extra
    texts = []
    for row in rows:
        cells = [row["method"], *(row[key] for key in keys), str(row["seeds"]), row["rounds"]]
        for head, digits in heads:
            text = figure_of(row.get(head, math.nan), row.get(f"{head}, std", math.nan), digits)
            reached = head.startswith(("rounds to", "MiB to", "simulated seconds to"))
            known = row.get("seeds that reach it" if reached else f"{head}, seeds", row["seeds"])
            if text and known < row["seeds"]:
                text += f" ({known} of {row['seeds']})"
            cells.append(text or ("-" if head in row and (head, digits) in extra else ""))
        texts.append(tuple(map(str, cells)))
    return Table(title, ("method", *keys, "seeds", "rounds", *(head for head, _ in heads)), tuple(texts), numbers)


def _to_target(group: Group, target: float, points: Callable[[FinishedRun], Points], timed: bool) -> tuple[list[float], int]:
    """Return the mean rounds, MiB and with ``timed`` simulated seconds to the target, and how many seeds reach it.

    The means are over these seeds.
    """
    reached = [(run, first_at(points(run), target)) for run in group.runs]
    known = [(run, t) for run, t in reached if t is not None]
    spent: list[list[float]] = [[float(t) for _, t in known], [mib_until(run, t) for run, t in known]]
    if timed:
        spent.append([dict(run.points(*SIMULATED_TIME))[t] for run, t in known])
    return [over_seeds(values)[0] for values in spent], len(known)


def mib_until(run: FinishedRun, server_round: int) -> float:
    """Return the MiB that all clients together have uploaded and received up to and including a round."""
    ways = [run.points("global", "system", f"bytes_{way}") for way in ("up", "down")]
    return sum(value for points in ways for t, value in points if t <= server_round) / MIB


def _mib(run: FinishedRun) -> float:
    return (run.number("bytes_up_per_client") + run.number("bytes_down_per_client")) / MIB


def _order(value: str) -> tuple[float, str]:
    """Return a key that sorts numbers as numbers, before words."""
    return number_of(value), value


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def compare_runs(a: FinishedRun, b: FinishedRun) -> tuple[Table, Table]:
    """Return two runs side by side: the keys that differ in their configurations, and the numbers of their summaries."""
    left, right = ({**flat(run.config), "seed": run.config.get("seed")} for run in (a, b))
    keys = [key for key in dict.fromkeys([*left, *right]) if left.get(key, "") != right.get(key, "")]
    rows = [(key, *("" if key not in side else format_value(side[key]) for side in (left, right))) for key in keys]
    differences = _side_by_side("Differences of the configurations", ("key", a.name, b.name), rows)
    numbers = []
    for key in dict.fromkeys([*a.summary, *b.summary]):
        one, other = a.number(key), b.number(key)
        if isinstance(a.summary.get(key), bool) or (math.isnan(one) and math.isnan(other)):
            continue
        difference = "" if math.isnan(one - other) else f"{other - one:+,.6g}"
        numbers.append((key, *("" if math.isnan(x) else f"{x:,.6g}" for x in (one, other)), difference))
    return differences, _side_by_side("Summaries", ("number", a.name, b.name, "difference"), numbers)


def _side_by_side(title: str, heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    return Table(title, heads, tuple(rows), pd.DataFrame(rows, columns=list(heads)))


def list_runs(runs: Sequence[FinishedRun]) -> Table:
    """Return a table with a line about each run."""
    rows = []
    for run in runs:
        summary = run.summary
        scores = [run.number("accuracy_final"), run.number("personal_accuracy_mean")]
        rows.append((
            run.name, run.method, *(str(summary.get(key, "")) for key in ("dataset", "partition", "participation", "seed")),
            f"{summary['rounds']} of {run.config['num_rounds']}", str(summary["status"]),
            *(figure_of(100 * score) for score in scores), figure_of(run.number("seconds"), digits=0),
        ))  # fmt: skip
    about = ("run", "method", "data set", "partition", "participation", "seed", "rounds", "status")
    heads = (*about, "test accuracy", "clients' accuracy", "seconds")
    return _side_by_side("Runs", heads, rows)


def comparison_table(comparison: Comparison) -> Table:
    """Return a paper's table in the paper's own layout, for the columns with a run of ours: ``ours (paper)``.

    Ours is mean ± standard deviation over seeds. A cell without a run has only the paper's value. A cell that the paper does
    not have has only ours.
    """
    columns = comparison.columns()
    methods = dict.fromkeys(comparison.cells["method"])
    rows = []
    for method in methods:
        cells = []
        for _, part in columns:
            chosen = part[part["method"] == method]
            cells.append("" if chosen.empty else beside(chosen.iloc[0]))
        rows.append((method, *cells))
    heads = ("method", *(" ".join(filter(None, (dataset, setting, metric))) for (dataset, setting, metric), _ in columns))
    return Table(f"{comparison.title}: ours (paper)", heads, tuple(rows), comparison.cells)


def beside(cell: Mapping[str, Any]) -> str:
    """Return ``66.21 (89.35)`` of a comparison's cell: ours, and the paper's, if they exist."""
    ours, paper = ours_of(cell), figure_of(cell["paper"])
    return f"{ours} ({paper})" if ours and paper else ours or (f"({paper})" if paper else "")


def ours_of(cell: Mapping[str, Any]) -> str:
    """Return our number of a comparison's cell, and of how many seeds if not all have it. "-" if none reached a target."""
    if cell["ours"] == UNREACHED_VALUES.get(cell["metric"]):
        return "-"
    some = f" ({cell['seeds']} of {cell['runs']})" if 0 < cell["seeds"] < cell["runs"] else ""
    return figure_of(cell["ours"], cell["ours_std"]) + some


def rank_table(comparison: Comparison) -> Table:
    """Return a row for each cell that we and the paper have: both values, their difference, and their ranks among these."""
    rows = []
    spread = comparison.both["ours_client_std"].notna().any()
    for cell in comparison.both.to_dict("records"):
        clients = (figure_of(cell["ours_client_std"]), figure_of(cell["paper_std"])) if spread else ()
        rows.append((
            *(str(cell[key]) for key in ("dataset", "setting", "metric", "method")), ours_of(cell), str(cell["seeds"]),
            figure_of(cell["paper"]), f"{cell['difference']:+z.2f}" if cell["seeds"] else "", *clients,
            *("" if math.isnan(cell[rank]) else f"{cell[rank]:g}" for rank in ("rank", "paper_rank")),
        ))  # fmt: skip
    over_clients = ("our deviation over clients", "the paper's deviation") if spread else ()
    heads = (
        "data set",
        "setting",
        "metric",
        "method",
        "ours",
        "seeds",
        "paper",
        "difference",
        *over_clients,
        "our rank of these",
        "the paper's",
    )
    return Table(f"{comparison.title}: cell by cell", heads, tuple(rows), comparison.both)


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Return a paper's table with ours and, if both have a cell, the cells one by one."""
    return [comparison_table(comparison), *([rank_table(comparison)] if len(comparison.both) else [])]


def comparison_text(comparison: Comparison) -> str:
    """Return a paper's table with ours in Markdown, with ranks, correlations with their numbers of cells, and missing cells."""
    lines = "".join(f"* {line}\n" for line in correlation_lines(comparison))
    return "\n".join([*(table.markdown for table in comparison_tables(comparison)), lines, missing_line(comparison) + "\n"])


def comparison_latex(comparison: Comparison) -> str:
    """Return the same in LaTeX: the table, the cells with their differences and ranks, and the correlations."""
    lines = "".join(f"\\par {escape_tex(line)}.\n" for line in correlation_lines(comparison))
    return "\n".join([*(table.latex for table in comparison_tables(comparison)), lines])


def correlation_lines(comparison: Comparison) -> list[str]:
    """Return Spearman's correlation with the paper: the mean over columns or other rankings, and each one's."""
    lines = list[str]()
    inner = comparison.correlations()
    known = [value for _, value, _ in inner if not math.isnan(value)]
    if len(known) > 1:
        by_column = find_ranking_columns(comparison.cells) == COLUMN
        within = f"within a column, the mean over {len(known)} columns" if by_column else "over settings, the mean"
        lines.append(f"Spearman's correlation with the paper {within}: {sum(known) / len(known):.2f}")
    for key, value, count in inner:
        lines.append(f"Spearman's correlation, {' '.join(filter(None, key))}: {_rho(value)} ({count} cells)")
    return [*lines, OTHER_SEEDS] if comparison.has_other_seeds else lines


def _rho(value: float) -> str:
    return "none, too few cells or all alike" if math.isnan(value) else f"{value:.2f}"


def missing_line(comparison: Comparison) -> str:
    """Name the paper's cells without a run, those whose runs do not have the number, and runs that repeat a cell.

    A whole column is named as one.
    """
    theirs = comparison.cells.dropna(subset=["paper"])
    whole, said = theirs.groupby(COLUMN).size(), []
    for what, cells in (("no run here", comparison.missing), ("a run without this number", comparison.silent)):
        named = []
        for key, part in cells.groupby(COLUMN, sort=False):
            methods = "all" if len(part) == whole[key] else ", ".join(part["method"])
            named.append(f"{' '.join(filter(None, key))} ({methods})")
        said += [f"{len(cells)} have {what}: {'; '.join(named)}."] if named else []
    of, every = f"Of the paper's {len(theirs)} cells", f"All {len(theirs)} cells of the paper's table have a run."
    line = f"{of} {' '.join(said)}" if said else every
    aside = [f"Not counted: {'; '.join(comparison.aside)}."] if comparison.aside else []
    measured = [f"What `{metric}` says is measured by `{MEASURED_BY[metric]}`." for metric in comparison.elsewhere]
    return " ".join([line, *aside, *measured])
