"""Write ``docs/RESULTS.md`` and a page for each file of ``results/``: setting, tables, figures, remarks."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from contrafed.core import registry
from contrafed.core.display_names import name_method
from contrafed.core.errors import UserError
from contrafed.report import claims, figures, plots, published, results, tables
from contrafed.report.groups import describe_mixes, group_runs, usable
from contrafed.report.measures import describe_left_out
from contrafed.report.names import label_group, name_table
from contrafed.report.pages import describe_training, format_differences, format_left_out, format_selection, join_remarks
from contrafed.report.published import MEASURED_BY, OTHER_SEEDS, Comparison
from contrafed.report.runs import FinishedRun
from contrafed.report.significance import BASELINE
from contrafed.report.statistics import spearman
from contrafed.report.tables import Table, figure_of
from contrafed.runs.output.console import format_count

HEAD = """# Results

`python report.py --results` writes this page and those below it from `results/`.
"""
GUIDE = """## How to read the tables

* Accuracies are percentages: the mean ± standard deviation (std) over seeds. One seed has no std.
* *Our value* is of our runs. *Published value* is the paper's. Ranks include only cells that have both.
* *Clients' accuracy* is weighted by the clients' test examples. *Std over clients* and the mean in a figure of clients are not.
* *Mean of the best five* is the mean of the five best evaluations of a run.
* *FedAvg's last* is FedAvg's accuracy after its last round in the same setting.
* *Rounds to* and *MiB to* FedAvg's last end at the first evaluation that reaches it. "-" means that no seed reaches it.
* `results/NAME.csv` has a row per run: configuration, seed, versions, commit, hardware, seconds.
"""
CLAIMS = """
Differences are those of two methods with the same clients, in points, after the last round that both have. With several seeds
the 95 % interval is in brackets. For the best of several baselines it holds for all of them at once (Bonferroni). The published
difference is then to the best of the same baselines.

A verdict needs three seeds and all rounds of the paper, or of the
code if the paper prints none. A claim is reproduced if the whole interval has the published sign. It is not reproduced if the
interval also has 0 or the other sign in it, and ends below the published difference. `results/claims.yaml` lists the claims.

The number of seeds is that of a paired t test which finds the published difference in 80 % of all cases. It needs the standard
deviation of the difference. For a claim with one or two seeds this is that of the same two methods on the digits. They have
five seeds there, in the same participation pattern. If the digits lack the pattern, it is pooled over Bernoulli, Markovian and
uniform.

Such a number is rough: with five seeds the true variance is between a third and eight times the estimate. On the digits all
seeds have one federation, so the number is rather too small if each seed has another. Without runs on the digits three seeds
are the least.
"""
CORRELATIONS = """
Within a column of a table, over the methods that have our value and the published one. The last column is for the same methods
on the table's page with the most cells. So it says what other settings change. Fewer than three methods have no correlation.
With few methods it says little: two random orders of four have a correlation of 0.8 or more in one case of six.
"""
# Of the table of runs. The CSV has them, and "rounds" has the planned number.
HIDDEN_COLUMNS = ("seconds", "num_rounds", "eval_every")
RANKS = ("rank", "paper_rank")


def write_results_pages(home: Path) -> list[Path]:
    """Write ``docs/RESULTS.md``, ``docs/results`` and ``docs/figures`` below ``home``, and return the files.

    The file ``results/README.md`` is the head of ``docs/RESULTS.md``. A file ``results/NAME.md`` has the title and the text of
    a page. Tables and figures come before its first heading of level two. A text without a CSV is a page without them.

    Args:
        home: The folder with ``results/`` and ``docs/``.

    Raises:
        UserError: If there are no CSVs, if one cannot be read, or if a page cannot be written.
    """
    folder = home / "results"
    stored, common = {path: results.load(path) for path in folder.glob("*.csv")}, folder / "README.md"
    if not stored:
        raise UserError(f"there are no results in {folder}: python report.py --results DIR keeps a folder's runs there")
    alone = sorted({*folder.glob("*.md")} - {common, *(path.with_suffix(".md") for path in stored)})
    index, below, drawn = home / "docs" / "RESULTS.md", home / "docs" / "results", home / "docs" / "figures"
    files, listed = [index], list[str]()
    try:
        for new in (below, drawn):
            new.mkdir(parents=True, exist_ok=True)
        for path, runs in sorted(stored.items(), key=lambda item: (not any(r.published_values for r in item[1]), item[0].stem)):
            title, text, pictures = _build_page(path, runs, drawn)
            files += [_write_page(below / f"{path.stem}.md", title, text), *pictures]
            listed.append(f"| [{title}](results/{path.stem}.md) | {len(runs)} |")
        for path in alone:
            title, text = _split_title(path)
            files.append(_write_page(below / path.name, title, text))
            listed.append(f"| [{title}](results/{path.name}) | |")
        # Its links start in results/, those of docs/RESULTS.md in docs/.
        summary = _split_title(common)[1].replace("](../docs/", "](") if common.exists() else ""
        if findings := claims.find_claims(folder):
            summary = f"## Claims of the papers\n\n{claims.build_claims_table(findings).markdown}{CLAIMS}\n{summary}"
        if (overview := build_overview(stored)).rows:
            summary += f"\n## Spearman's correlation with the published values\n\n{overview.markdown}{CORRELATIONS}"
        pages = "## Pages\n\n| page | runs |\n| --- | ---: |\n" + "\n".join(listed) + "\n"
        index.write_text("\n".join(part for part in (HEAD, summary, pages, GUIDE) if part), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {home / 'docs'} ({error.strerror})") from error
    return files


def _write_page(path: Path, title: str, text: str) -> Path:
    path.write_text(f"# {title}\n\n{text}", encoding="utf-8")
    return path


def _split_title(path: Path) -> tuple[str, str]:
    """Return the title of a text of ``results/``, and the text below it."""
    title, _, rest = path.read_text(encoding="utf-8").strip().removeprefix("# ").partition("\n")
    return title, rest.strip() + "\n"


def _build_page(path: Path, stored: Sequence[FinishedRun], drawn: Path) -> tuple[str, str, list[Path]]:
    """Return a page's title, its text, and its figures' files."""
    runs, aside = usable(stored, unfinished=True)
    words = path.with_suffix(".md")
    title, prose = _split_title(words) if words.exists() else (path.stem, "")
    setting, remarks = _split_remarks(prose)
    parts, pictures = [setting, describe_runs(runs, path.name), *_compare_with_papers(runs), "## Figures\n"], []
    for stem, figure in (figures.of_runs(runs, title) | figures.of_papers(runs)).items():
        png, pdf = plots.save(figure, drawn / f"{path.stem}-{stem}")
        pictures += [png, pdf]
        parts.append(f"![{title}: {stem.replace('_', ' ')}](../figures/{png.name})\n")
    groups = group_runs(runs)
    every = tables.runs_table(runs, title)
    own = [head for head in every.heads if "FedAvg's last" in head and {group.method for group in groups} == {"fedavg"}]
    every = name_table(drop_columns(every, (*HIDDEN_COLUMNS, *own)), [key for key, _ in groups[0].setting])
    guide = "The columns are explained in [How to read the tables](../RESULTS.md#how-to-read-the-tables).\n"
    parts += [remarks, "## All runs\n", every.markdown, guide]
    mixes = describe_mixes(groups, lambda group: label_group(group, group.setting))
    left_out = describe_left_out(groups, BASELINE)
    parts += [join_remarks(mixes, left_out, describe_training(runs)).lstrip(), format_selection(runs).lstrip()]
    parts += [format_differences(runs, title, named=True).lstrip(), format_left_out(aside).lstrip()]
    return title, "\n".join(part for part in parts if part), pictures


def _split_remarks(prose: str) -> tuple[str, str]:
    """Return the text before the first heading of level two, and the rest."""
    setting, mark, remarks = f"\n{prose}".partition("\n## ")
    return setting.strip() and setting.strip() + "\n", f"{mark}{remarks}".lstrip()


def describe_runs(runs: Sequence[FinishedRun], file: str) -> str:
    """Return a line about all runs of a page: number, seeds, scale, replaced data, and the file with the rest."""
    seeds = ", ".join(map(str, dict.fromkeys(sorted(run.summary["seed"] for run in runs))))
    said = [f"{format_count(len(runs), 'run')}, seed {seeds}."]
    for key, words in (("scale", "Scale"), ("stand_in", "Images")):
        if found := dict.fromkeys(str(run.summary[key]) for run in runs if run.summary.get(key)):
            said.append(f"{words}: {', '.join(found)}.")
    return f"{' '.join(said)} Configurations, versions and machines: `results/{file}`.\n"


def drop_columns(table: Table, heads: Sequence[str]) -> Table:
    """Return a table without the columns of these heads."""
    kept = [i for i, head in enumerate(table.heads) if head not in heads]
    rows = tuple(tuple(row[i] for i in kept) for row in table.rows)
    return replace(table, heads=tuple(table.heads[i] for i in kept), rows=rows)


def _compare_with_papers(runs: Sequence[FinishedRun]) -> Iterator[str]:
    """Yield sections of the papers' tables with our values. Cells of single methods share one table."""
    alone = []
    for comparison in published.compare(runs):
        ours = comparison.cells.dropna(subset=["ours"])
        if ours["method"].nunique() > 1 or ours["rank"].notna().any():
            yield from _compare_table(comparison)
        elif len(ours):  # a whole table for one method without ranks would hide its values
            alone.append((comparison, ours))
    if alone:
        yield "## Single methods\n"
        yield build_cell_table(alone).markdown


def _compare_table(comparison: Comparison) -> Iterator[str]:
    yield f"## {comparison.name}" + (f", scale={comparison.scale}" if comparison.scale else "") + "\n"
    if comparison.changed:
        yield f"Changed settings: {', '.join(f'`{key}`' for key in comparison.changed)}.\n"
    for key, part in comparison.columns():
        yield f"### {name_column(*key)}\n"
        yield build_column_table(part, name_column(*key)).markdown
    yield "### Spearman's correlation with the published values\n"
    yield build_correlation_table(comparison).markdown
    yield " ".join(_describe_missing(comparison)) + "\n"
    if comparison.aside:
        yield "Not included:\n\n" + "".join(f"* {line}\n" for line in comparison.aside)


def name_column(dataset: str, setting: str, metric: str) -> str:
    """Return the name of a paper's column: ``CIFAR-10 bernoulli, test accuracy``."""
    return ", ".join(filter(None, (" ".join(filter(None, (dataset, setting))), metric.replace("_", " "))))


def build_column_table(cells: pd.DataFrame, title: str) -> Table:
    """Return one column of a paper's table: a row for each method with a run, one number in a cell."""
    rows, spread = [], cells["ours_client_std"].notna().any()
    for cell in cells.to_dict("records"):
        ours = tables.ours_of(cell)
        if not ours:  # no run: the text below the tables counts these cells
            continue
        stds = (figure_of(cell["ours_client_std"]), figure_of(cell["paper_std"])) if spread else ()
        ranks = ("" if math.isnan(cell[rank]) else f"{cell[rank]:g}" for rank in RANKS)
        method, seeds, theirs = name_method(str(cell["method"])), str(cell["runs"]), figure_of(cell["paper"])
        rows.append((method, seeds, ours, theirs, _difference(cell), *stds, *ranks))
    over_clients = ("our std over clients", "published std over clients") if spread else ()
    heads = ("method", "seeds", "our value", "published value", "difference", *over_clients, "our rank", "published rank")
    table = Table(title, heads, tuple(rows), cells)
    return table if cells["runs"].max() > 1 else drop_columns(table, ["seeds"])


def build_cell_table(found: Sequence[tuple[Comparison, pd.DataFrame]]) -> Table:
    """Return a row for each cell of comparisons that have one method: its settings, our value and the published value."""
    rows = [
        (
            comparison.name, ", ".join(comparison.changed), name_column(cell["dataset"], cell["setting"], cell["metric"]),
            name_method(str(cell["method"])), tables.ours_of(cell), figure_of(cell["paper"]), _difference(cell),
        )
        for comparison, cells in found for cell in cells.to_dict("records")
    ]  # fmt: skip
    heads = ("table", "changed settings", "column", "method", "our value", "published value", "difference")
    return Table("Single methods", heads, tuple(rows), pd.DataFrame(rows, columns=list(heads)))


def build_correlation_table(comparison: Comparison) -> Table:
    """Return Spearman's correlation with the paper within each column or other ranking of more than one cell."""
    rows = [
        (_name_ranking(key), "" if math.isnan(rho) else f"{rho:.2f}", str(cells))
        for key, rho, cells in comparison.correlations() if cells > 1
    ]  # fmt: skip
    heads = ("cells", "correlation", "number of cells")
    return Table("Spearman's correlation", heads, tuple(rows), pd.DataFrame(rows, columns=list(heads)))


def build_overview(stored: Mapping[Path, Sequence[FinishedRun]]) -> Table:
    """Return Spearman's correlation of every ranking on the pages, and that of the main page on the same cells.

    Args:
        stored: The runs of each file of ``results/``.
    """
    found = [
        (path.stem, comparison, key, part)
        for path, runs in sorted(stored.items(), key=lambda item: item[0].stem)
        for comparison in published.compare(usable(runs, unfinished=True)[0])
        for key, part in split_rankings(comparison)
    ]
    rows = []
    for page, comparison, key, part in found:
        rho, count = spearman(part["ours"].tolist(), part["paper"].tolist())
        if math.isnan(rho):
            continue
        same = [item for item in found if (item[1].name, item[2]) == (comparison.name, key)]
        main = max((item[3] for item in same), key=len)
        shared = main.loc[main.index.intersection(part.index)]
        before = math.nan if main is part else spearman(shared["ours"].tolist(), shared["paper"].tolist())[0]
        place = (comparison.name, _name_ranking(key), f"[{page}](results/{page}.md)")
        changed = ", ".join(f"`{key}`" for key in comparison.changed)
        rows.append((*place, changed, str(count), f"{rho:.2f}", "" if math.isnan(before) else f"{before:.2f}"))
    heads = ("table", "column", "page", "changed settings", "methods", "correlation", "correlation of the main page")
    return Table("Spearman's correlation", heads, tuple(rows), pd.DataFrame(rows, columns=list(heads)))


def split_rankings(comparison: Comparison) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """Return (what is ranked, its accuracies that have our value and the paper's, by cell) of each ranking."""
    both = comparison.both[comparison.both["metric"].str.endswith("accuracy")]
    grouped = both.groupby(published.find_ranking_columns(comparison.cells), sort=False)
    return [(key, part.set_index(published.CELL)) for key, part in grouped]  # type: ignore[misc]


def _name_ranking(key: Sequence[str]) -> str:
    return " ".join(map(_name_part, filter(None, key)))


def _name_part(part: str) -> str:
    """Return the name of a method, or else a part of a paper's column without its underlines."""
    is_method = re.split("[/+]", part)[0] in registry.choices("strategy")
    return name_method(part) if is_method else part.replace("_", " ")


def _difference(cell: dict) -> str:
    return f"{cell['difference']:+z.2f}" if cell["seeds"] and not math.isnan(cell["difference"]) else ""


def _describe_missing(comparison: Comparison) -> Iterator[str]:
    theirs = comparison.cells["paper"].notna().sum()
    yield f"Our runs fill {theirs - len(comparison.missing) - len(comparison.silent)} of the table's {theirs} cells."
    if len(comparison.silent):
        yield f"{len(comparison.silent)} more have a run without this number."
    for metric in comparison.elsewhere:
        yield f"`{MEASURED_BY[metric]}` measures `{metric}`."
    if comparison.has_other_seeds:
        yield f"{OTHER_SEEDS}."
