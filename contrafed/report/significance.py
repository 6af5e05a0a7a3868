"""What runs of several methods and seeds show: the best of each setting, differences to a baseline, ranks over settings.

All methods of a seed have the same federation, so they are compared by the differences of equal seeds.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from contrafed.core.errors import UserError, unknown
from contrafed.report.beside import Beside
from contrafed.report.groups import Group, describe_differing, group_finished, short
from contrafed.report.latex import escape_tex, float_tex
from contrafed.report.measures import choose_measures, use_measure
from contrafed.report.runs import FinishedRun, Points
from contrafed.report.statistics import (
    PairedDifference,
    Ranking,
    compare_pairs,
    correct_holm,
    over_seeds,
    rank_methods,
)
from contrafed.report.tables import Table, figure_of

BASELINE = "fedavg"
MAX_COLUMNS = 6  # settings in one table of a page
NARROW = 2  # settings that fit in one of two columns

BOLD_CELLS = "Bold: the best of a column, and all whose paired difference to it has a 95 % interval with 0 in it"
BOLD = f"""
{BOLD_CELLS}. Methods
are compared on the seeds that both have. One seed gives no interval, so only the best is bold then. Two give a wide one. If all
differences are equal, but not 0, only the best is bold, too. A cell with fewer seeds than the title says has their number in
brackets.
"""
DIFFERENCES = """
Paired differences of equal seeds, in points. p: paired t test, corrected by Holm for the number of rows with a p. Seeds for one
point: how many seeds find a true difference of one point with probability 0.8 at level 0.05, as estimated from these pairs. If
all differences are 0, the interval is 0 to 0 and p is 1. If they are equal but not 0, there is no interval and no p.
"""
RANKS = """
Rank 1 is the best. Friedman's test asks whether any method differs. If its p is below 0.05, two methods differ if their mean
ranks are further apart than Nemenyi's critical difference (level 0.05). Otherwise no two methods were found to differ.
"""


@dataclass(frozen=True)
class Scores:
    """The last accuracy of each method, setting and seed, in percent.

    ``table`` has a column for each method, and a row for each setting and seed. ``settings`` has the values of ``keys`` that a
    setting stands for. ``remarks`` are lines on what makes the methods less comparable.
    """

    said: str
    keys: tuple[str, ...]
    settings: dict[str, tuple[str, ...]]
    table: pd.DataFrame
    baseline: str | None
    remarks: tuple[str, ...] = ()

    @property
    def methods(self) -> list[str]:
        """The methods, by their mean over settings, the best first."""
        return [str(method) for method in self.means.mean().sort_values(ascending=False, kind="stable").index]

    @property
    def means(self) -> pd.DataFrame:
        """The mean over seeds: a row a setting, a column a method."""
        return self.table.groupby(level="setting", sort=False).mean()

    def of(self, setting: str, method: str) -> list[float]:
        """Return a method's value of each seed of a setting, NaN for a seed without one."""
        return [float(value) for value in self.table.loc[[setting], method]]


def collect_scores(
    runs: Sequence[FinishedRun],
    baseline: str | None = None,
    score: tuple[str, Callable[[FinishedRun], Points]] | None = None,
) -> Scores | None:
    """Return the scores of finished runs, or None for fewer than two methods.

    Keys of a method alone, such as a weight of its loss, belong to the method's name where it has several values of them. All
    others belong to the setting.

    Args:
        runs: Runs that tables take (``usable``).
        baseline: The method to compare with. None: FedAvg if it is among the runs.
        score: What is compared, as ``accuracy_of`` returns it. None: ``choose_measures``.

    Raises:
        UserError: If no run is of the baseline, or none of its runs has the setting and seed of another method's.
    """
    found = group_finished(runs)
    methods = {group.method for group in found}
    if baseline is not None and baseline not in methods:
        raise unknown("baseline", baseline, sorted(methods))
    chosen = baseline or (BASELINE if BASELINE in methods else None)
    measures = use_measure(found, *score) if score else choose_measures(found, chosen)
    found = [group for group in found if id(group) in measures.points]
    beside = Beside(found, chosen)
    rows, settings, ends = list[dict[str, Any]](), dict[str, tuple[str, ...]](), dict[str, set[int]]()
    for group in found:
        setting = beside.setting(group)
        label = label_setting(setting)
        settings[label] = tuple(str(value) for _, value in setting)
        own = label_method(group, beside.own(group))
        for run in group.runs:
            if values := measures.points[id(group)](run):
                ends.setdefault(label, set()).add(values[-1][0])
                rows.append({"setting": label, "seed": run.config["seed"], "method": own, "score": 100 * values[-1][1]})
    if len({row["method"] for row in rows}) < 2:
        return None
    table = pd.DataFrame(rows).pivot(index=["setting", "seed"], columns="method", values="score")
    table = table.reindex([setting for setting in settings if setting in table.index.levels[0]], level="setting")
    if baseline is not None:
        _check_baseline(table, baseline, beside)
    keys = tuple(short(key) for key, _ in beside.setting(found[0]))
    remarks = (*describe_ends(ends), *describe_differing(found))
    return Scores(measures.said, keys, settings, table, chosen, remarks)


def describe_ends(ends: Mapping[str, Collection[int]]) -> list[str]:
    """Return a line about settings whose runs end in several rounds (``early_stop``, ``target_accuracy``), if there are any."""
    several = [f"{min(at)} to {max(at)}" + (f" in {label}" if label else "") for label, at in ends.items() if len(at) > 1]
    return [f"Last rounds differ: {'; '.join(several)}."] if several else []


def _check_baseline(table: pd.DataFrame, baseline: str, beside: Beside) -> None:
    """Raise ``UserError`` if no other method has a score in a setting and seed of the baseline."""
    if baseline in table and table.drop(columns=baseline)[table[baseline].notna()].notna().to_numpy().any():
        return
    reason, fix = "", f"run another method in a setting and with a seed of {baseline}"
    if keys := ", ".join(sorted(beside.baseline_keys)):
        reason, fix = f", as {baseline} has several values of {keys}", f"report runs with one value of {keys}"
    problem = f"no other method has a run in a setting and with a seed of {baseline}{reason}"
    raise UserError(f"baseline: {problem}. Fix: {fix}, or choose another baseline")


def label_setting(setting: Sequence[tuple[str, Any]]) -> str:
    """Return a setting's label: ``partition.alpha=0.1, participation=cyclic``."""
    return ", ".join(f"{short(key)}={value}" for key, value in setting)


def label_method(group: Group, own: Sequence[tuple[str, Any]]) -> str:
    """Return a group's method with its own keys: ``pmfl temperature=0.1``."""
    return replace(group, setting=tuple(own)).label


def compare_to_best(scores: Scores, setting: str) -> dict[str, bool]:
    """Return {method: whether it is the best of a setting, or cannot be told from the best}, without methods that lack it.

    A single method is not compared.

    The best is better than most others on the seeds that both have. So it is the one with the highest mean if all have all.
    """
    values = scores.table.loc[[setting]].dropna(axis=1, how="all")
    means = values.mean()
    if len(means) < 2:
        return {}
    wins = {method: sum((values[method] - values[other]).mean() > 0 for other in means.index) for method in means.index}
    best = scores.of(setting, str(max(means.index, key=lambda method: (wins[method], means[method]))))
    return {str(method): compare_pairs(scores.of(setting, str(method)), best).is_tie for method in means.index}


def build_method_table(scores: Scores, title: str) -> Table:
    """Return methods by settings, the best of each column in bold. The CSV has a row a cell."""
    methods, settings = scores.methods, [str(setting) for setting in scores.means.index]
    bold = {setting: compare_to_best(scores, setting) for setting in settings}
    rows, numbers = list[tuple[str, ...]](), list[dict[str, Any]]()
    most = _count_seeds(scores)
    for method in methods:
        cells = [method]
        for setting in settings:
            values = [value for value in scores.of(setting, method) if not math.isnan(value)]
            mean, std = over_seeds(values)
            text = figure_of(mean, std) + (f" ({len(values)} of {most})" if 0 < len(values) < most else "")
            is_best = bold[setting].get(method, False)
            cells.append(f"**{text}**" if is_best else text)
            if values:
                described = dict(zip(scores.keys, scores.settings[setting], strict=True))
                cell = {"seeds": len(values), "mean": mean, "std": std, "best": is_best}
                numbers.append({"method": method, **described, **cell})
        rows.append(tuple(cells))
    heads = ("method", *(setting or f"{scores.said}, last (%)" for setting in settings))
    seeds = "one seed" if most == 1 else f"mean ± std over {most} seeds"
    return Table(f"{title}: {scores.said}, last round (%), {seeds}", heads, tuple(rows), pd.DataFrame(numbers))


def _count_seeds(scores: Scores) -> int:
    """Return the most seeds that a cell has."""
    return int(scores.table.groupby(level="setting").count().to_numpy().max())


def build_differences(scores: Scores, title: str) -> Table | None:
    """Return a row for each method and setting that has seeds in common with the baseline, or None without any."""
    if scores.baseline is None:
        return None
    found = list[tuple[str, str, PairedDifference]]()
    for setting in map(str, scores.means.index):
        for method in scores.methods:
            if method != scores.baseline and scores.baseline in scores.table:
                pair = compare_pairs(scores.of(setting, method), scores.of(setting, scores.baseline))
                found += [(setting, method, pair)] if pair.n else []
    if not found:
        return None
    corrected = correct_holm([pair.p for *_, pair in found])
    rows, numbers = list[tuple[str, ...]](), list[dict[str, Any]]()
    for (setting, method, pair), p in zip(found, corrected, strict=True):
        values = scores.settings[setting]
        interval = "" if math.isnan(pair.low) else f"{pair.low:+z.2f} to {pair.high:+z.2f}"
        seeds = "" if math.isnan(pair.seeds) else f"{pair.seeds:.0f}" if math.isfinite(pair.seeds) else "more than 10,000"
        rows.append((method, *values, str(pair.n), f"{pair.mean:+z.2f}", interval, _format_p(p), seeds))
        described = dict(zip(scores.keys, values, strict=True))
        said = {"n": pair.n, "difference": pair.mean, "low": pair.low, "high": pair.high, "p": pair.p, "p_holm": p}
        numbers.append({"method": method, **described, **said, "seeds_for_one_point": pair.seeds})
    heads = ("method", *scores.keys, "n", "difference", "95 % interval", "p (Holm)", "seeds for one point")
    return Table(f"{title}: {scores.said}, differences to {scores.baseline}", heads, tuple(rows), pd.DataFrame(numbers))


def describe_unpaired(scores: Scores) -> str:
    """Return a sentence about methods without a seed of the baseline in a setting, empty if there are none."""
    if scores.baseline is None or scores.baseline not in scores.table:
        return ""
    without = list[str]()
    for method in scores.methods:
        for setting in map(str, scores.means.index):
            own, paired = (~np.isnan(scores.of(setting, each)) for each in (method, scores.baseline))
            if own.any() and not (own & paired).any():
                without.append(" in ".join(filter(None, (method, setting))))
    return f"\nWithout a seed of {scores.baseline}, and so without a difference: {'; '.join(without)}.\n" if without else ""


def _format_p(p: float) -> str:
    """Return a p value with three digits, and an empty cell for NaN."""
    return "< 0.001" if p < 0.001 else figure_of(p, digits=3)


def rank_scores(scores: Scores) -> Ranking | None:
    """Return the methods ranked over the settings and seeds that all of them have, or None if there are too few of either."""
    whole = scores.table.dropna().groupby(level="setting", sort=False).mean()
    return rank_methods({method: whole[method].tolist() for method in scores.methods})


def build_ranks(scores: Scores, ranking: Ranking, title: str) -> Table:
    """Return the methods' mean ranks, with both tests in the title."""
    rows = tuple((method, f"{rank:.2f}") for method, rank in ranking.ranks.items())
    numbers = pd.DataFrame(list(ranking.ranks.items()), columns=["method", "mean rank"])
    return Table(f"{title}: {describe_ranking(scores, ranking)}", ("method", "mean rank"), rows, numbers)


def describe_ranking(scores: Scores, ranking: Ranking) -> str:
    """Return a ranking's tests in a line."""
    settings = f"{ranking.num_settings} of {len(scores.means)} settings"
    friedman = f"Friedman's p = {ranking.p:.3g}, critical difference {ranking.critical_difference:.2f}"
    return f"mean ranks over {settings} by {scores.said}, {friedman}"


def build_tables(scores: Scores, title: str) -> dict[str, tuple[Table, str, str]]:
    """Return {file's name: (table, text in Markdown, LaTeX)} of all that the scores give."""
    cells = build_method_table(scores, title)
    remarks = "".join(f"\n{line}\n" for line in scores.remarks)
    differences, unpaired = build_differences(scores, title), describe_unpaired(scores)
    text = cells.markdown + BOLD + remarks + ("" if differences else unpaired)
    out = {"methods": (cells, text, write_latex(scores, cells))}
    if differences is not None:
        out["differences"] = (differences, differences.markdown + DIFFERENCES + remarks + unpaired, differences.latex)
    if (ranking := rank_scores(scores)) is not None:
        ranks = build_ranks(scores, ranking, title)
        out["ranks"] = (ranks, ranks.markdown + RANKS, ranks.latex)
    return out


def write_latex(scores: Scores, cells: Table) -> str:
    """Return methods by settings in LaTeX for a two-column page, for the packages booktabs and graphicx.

    Up to two settings fit in one column, up to six on a page. More become a table for every six. A wide table is made smaller.
    """
    values = [scores.settings[str(setting)] for setting in scores.means.index]
    parts = [range(start, min(start + MAX_COLUMNS, len(values))) for start in range(0, len(values), MAX_COLUMNS)]
    said = f"{cells.title}. {BOLD_CELLS}"
    written = ["% \\usepackage{booktabs,graphicx}\n"]
    for number, part in enumerate(parts, 1):
        heads = [[key, *(values[column][row] for column in part)] for row, key in enumerate(scores.keys)]
        heads = heads or [["method", scores.said]]
        lines = [" & ".join(map(escape_tex, head)) + r" \\" for head in heads]
        body = [" & ".join(map(_format_cell, [row[0], *(row[1 + column] for column in part)])) + r" \\" for row in cells.rows]
        title = said + (f" (part {number} of {len(parts)})." if len(parts) > 1 else ".")
        written.append(float_tex("table" if len(values) <= NARROW else "table*", title, "l" + "r" * len(part), lines, body))
    return "\n".join(written)


def _format_cell(cell: str) -> str:
    """Return a cell in LaTeX: its mean in bold where Markdown has it so, its standard deviation small."""
    mean, plus, std = cell.strip("*").partition(" ± ")
    text = escape_tex(mean)
    text = rf"\textbf{{{text}}}" if cell.startswith("**") else text
    return text + (rf" {{\scriptsize$\pm$ {std}}}" if plus else "")
