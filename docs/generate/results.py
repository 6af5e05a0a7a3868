"""Return the results of a method from results/ with the functions of reports. Methods without results have none.

``python docs/generate/results.py`` updates the README's table of the papers' claims.
"""

import io
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from blocks import ROOT

sys.path.insert(0, str(ROOT))

from contrafed.core.display_names import name_method
from contrafed.report import claims, figures, published, results, tables
from contrafed.report.beside import Beside
from contrafed.report.groups import Group, group_runs, usable
from contrafed.report.names import label_group
from contrafed.report.runs import FinishedRun, accuracy_of
from contrafed.report.statistics import over_seeds


@cache
def load_stored_runs(home: Path = ROOT) -> dict[str, tuple[str, list[FinishedRun]]]:
    """Return {name: (title, runs)} of the files in ``home/results``."""
    found = {}
    for path in sorted((home / "results").glob("*.csv"), key=lambda path: path.stem):
        words = path.with_suffix(".md")
        head = words.read_text(encoding="utf-8").strip().partition("\n")[0] if words.exists() else path.stem
        runs, _ = usable(results.load(path), unfinished=True)
        if runs:
            found[path.stem] = (head.removeprefix("#").strip(), runs)
    return found


@cache
def load_stored_groups(home: Path = ROOT) -> dict[str, list[Group]]:
    """Return {name: the groups of its runs that differ only in seeds} of the files in ``home/results``."""
    return {stem: group_runs(runs) for stem, (_, runs) in load_stored_runs(home).items()}


@cache
def compare_stored(home: Path = ROOT) -> dict[str, list[published.Comparison]]:
    """Return {name: its comparisons with the papers' tables} of the files in ``home/results``."""
    return {stem: list(published.compare(runs)) for stem, (_, runs) in load_stored_runs(home).items()}


def is_of(method: str, name: str) -> bool:
    """Whether a table's method, say ``pmfl/no_mct`` or ``fedrcl+fedadam``, is the method ``name`` or one of its variants."""
    return method.split("/")[0].split("+")[0] == name


def beside_fedavg(name: str, every: list[Group]) -> tuple[list[Group], list[Group]]:
    """Return a method's groups of these, and these with FedAvg's groups of equal settings.

    FedAvg's groups determine which settings are compared.
    """
    place = Beside(every, "fedavg").setting
    own = [group for group in every if is_of(group.method, name)]
    places = [place(group) for group in own]
    return own, [g for g in every if g in own or (g.method == "fedavg" and place(g) in places)]


def section(name: str, home: Path = ROOT) -> list[str]:
    """Return the section of a method's page: our values, the papers' values, and the curve. It is empty without values."""
    lines = []
    for stem, (title, _) in load_stored_runs(home).items():
        own, compared = beside_fedavg(name, load_stored_groups(home)[stem])
        if not own:
            continue
        said, points = accuracy_of([run for group in compared for run in group.runs])
        kept = f"results/{stem}.md"
        page = [f"[Settings and remarks](../{kept})", ""] if (home / "docs" / kept).exists() else []
        lines += [f"### {title}", "", *page]
        cells = beside_the_papers(name, compare_stored(home)[stem])
        # A run has one number: the paper's measure if the paper has its cell, else its last accuracy.
        others = [group for group in own if not (cells and group.runs[0].published_values)]
        if others:
            lines += [f"| setting | {said}, last (%) | seeds |", "| --- | ---: | ---: |"]
        for group in others:
            last = over_seeds([100 * points(run)[-1][1] for run in group.runs if points(run)])
            lines.append(f"| {label_group(group, group.setting)} | {tables.figure_of(*last)} | {len(group.runs)} |")
        lines += [*([""] if others else []), *cells]
        lines += [f"![Accuracy over rounds, {title}](../figures/method-{name}-{stem}.png)", ""]
    if not lines:
        return []
    where = "[Results](../RESULTS.md) has the settings and remarks." if (home / "docs" / "RESULTS.md").exists() else ""
    return ["## Results", "", where, "", *lines]


def beside_the_papers(name: str, comparisons: list[published.Comparison]) -> list[str]:
    """Return a table of the papers' cells that runs fill for a method."""
    rows = []
    for comparison in comparisons:
        for cell in comparison.both.to_dict("records"):
            if is_of(str(cell["method"]), name):
                method, metric = name_method(str(cell["method"])), cell["metric"].replace("_", " ")
                where = ", ".join(filter(None, (cell["dataset"], cell["setting"], method, metric)))
                ours, theirs = tables.ours_of(cell), tables.figure_of(cell["paper"], cell["paper_std"])
                rows.append(f"| {comparison.title} | {where} | {ours} | {theirs} |")
    head = ["Each value is the paper's measure, which need not be the last accuracy. PMFL's tables have the mean of the five"]
    head += ["best evaluations.", "", "| table | cell | our value | published value |", "| --- | --- | ---: | ---: |"]
    return [*head, *rows, ""] if rows else []


def pictures(name: str, home: Path = ROOT) -> Iterator[tuple[str, bytes]]:
    """Yield (file, PNG) of a method's curves, with FedAvg's if they have the same setting."""
    for stem, (title, _) in load_stored_runs(home).items():
        own, shown = beside_fedavg(name, load_stored_groups(home)[stem])
        if not own:
            continue
        said, points = accuracy_of([run for group in shown for run in group.runs])
        file = io.BytesIO()
        figures.accuracy(shown, title, said, points).savefig(file, format="png", dpi=130)
        yield f"figures/method-{name}-{stem}.png", file.getvalue()


TABLE = re.compile(r"<!-- results -->\n.*?<!-- end of results -->\n", re.DOTALL)


def readme_table(home: Path = ROOT) -> str:
    """Return the README's table: the papers' claims, our differences, and a verdict."""
    table = claims.build_claims_table(claims.find_claims(home / "results"), ("claim", "table", "published", "ours", "verdict"))
    said = (
        "Differences between the two methods are in points. With several seeds the 95 % interval is in brackets. A verdict\n"
        "needs three seeds, and all rounds of the paper or, if it prints none, of its code.\n"
        "[Results](docs/RESULTS.md) has what is still needed, the reasons, and all values.\n"
    )
    return f"<!-- results -->\n{table.markdown.strip()}\n\n{said}<!-- end of results -->\n"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(TABLE.sub(lambda _: readme_table(), readme.read_text(encoding="utf-8")), encoding="utf-8")
