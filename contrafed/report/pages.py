"""Write reports: a folder of tables and figures, the table and figure of a sweep, and ``docs/RESULTS.md``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contrafed.core.errors import UserError
from contrafed.report import figures, plots, published, results, significance, tables
from contrafed.report.groups import describe_mixes, group_runs, usable
from contrafed.report.rank_diagram import draw_rank_diagram
from contrafed.report.runs import FinishedRun, accuracy_of, find
from contrafed.report.tables import Table
from contrafed.runs.output.console import format_count

HEAD = """# Results

Made by `python report.py --results` from `results/` alone. `results/NAME.csv` has one row per run: configuration, seed,
versions, commit, hardware and seconds; `results/NAME.md` is the text at the head of a section, or a section by itself.
Accuracies are percentages, mean ± sample standard deviation over seeds; deviations over clients are called so. In a paper's
table ours stands first, the paper's in brackets; ranks count only cells that both have. "FedAvg's last" is FedAvg's accuracy
after its last round in the row's own setting; rounds and MiB to it are those of the first evaluation that reaches it, over
the seeds that do (how many, where not all do; "-" where none does).
"""


def write(
    runs: Sequence[FinishedRun], folder: Path, title: str, target: float | None = None, baseline: str | None = None
) -> list[Path]:
    """Write every table (Markdown, CSV, LaTeX) and figure (PNG, PDF) of these runs, and return the files.

    Args:
        runs: The runs.
        folder: The folder.
        title: Title of the tables and figures.
        target: Accuracy, as a fraction, to which rounds and MiB are counted. The default is the runs' ``target_accuracy``, or
            FedAvg's last accuracy in a row's setting.
        baseline: The method that others are compared with. The default is FedAvg.

    Raises:
        UserError: If the folder cannot be written, or no run is of the baseline.
    """
    found: dict[str, tuple[Table, str, str]] = {}
    title = tables.format_title(runs, title)
    every = tables.runs_table(runs, title, target)
    found["runs"] = (every, every.markdown + tables.READ + _mixes(runs), every.latex)
    for comparison in published.compare(runs):
        text, latex = tables.comparison_text(comparison), tables.comparison_latex(comparison)
        found[comparison.stem] = (tables.comparison_table(comparison), text, latex)
    drawn = figures.of_runs(runs, title) | figures.of_papers(runs)
    if (scores := significance.collect_scores(runs, baseline)) is not None:
        found |= significance.build_tables(scores, title)
        if (ranking := significance.rank_scores(scores)) is not None:
            drawn["ranks"] = draw_rank_diagram(ranking, f"{title}: {significance.describe_ranking(scores, ranking)}")
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stem, (table, text, latex) in found.items():
            for kind, content in (("md", f"# {table.title}\n\n{text}"), ("csv", table.csv), ("tex", latex)):
                files.append(folder / f"{stem}.{kind}")
                files[-1].write_text(content, encoding="utf-8")
        for stem, figure in drawn.items():
            files += plots.save(figure, folder / stem)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})") from error
    return files


def leave(folder: Path, runs: Sequence[Path]) -> None:
    """Write table and figure of a sweep's finished jobs to its folder: ``sweep.md``, ``.csv``, ``.png`` and ``.pdf``.

    Nothing is written for a single run, which has its own. Errors are printed in a line, because the sweep itself is done.
    """
    try:
        damaged, whole = list[str](), list[FinishedRun]()
        for path in runs:
            try:
                whole += find([path])
            except UserError as error:
                damaged.append(str(error))
        found, aside = usable(whole)
        if aside := damaged + aside:
            print(f"{'no' if len(found) < 2 else 'from the'} table of the sweep, left out: {'; '.join(aside)}", flush=True)
        if len(found) < 2:
            return
        title = tables.format_title(found, folder.name)
        table = tables.runs_table(found, title)
        text = f"# {title}\n\n{table.markdown}{tables.READ}{_mixes(found)}{_differences(found, title)}"
        (folder / "sweep.md").write_text(text, encoding="utf-8")
        (folder / "sweep.csv").write_text(table.csv, encoding="utf-8")
        plots.save(figures.accuracy(*figures.quiet(group_runs(found), title), *accuracy_of(found)), folder / "sweep")
    except (UserError, OSError) as error:
        print(f"no table of the sweep: {error}", flush=True)
    else:
        print(f"a table and a figure of {len(found)} runs are in {folder}: sweep.md, sweep.png", flush=True)


def _mixes(runs: Sequence[FinishedRun]) -> str:
    """Return a paragraph about rows of the table of runs whose runs are not alike, empty if there are none."""
    line = describe_mixes(group_runs(runs))
    return f"\n{line}\n" if line else ""


def _differences(runs: Sequence[FinishedRun], title: str) -> str:
    """Return the differences to FedAvg as a section; empty where no method has two seeds in common with it."""
    scores = significance.collect_scores(runs)
    table = None if scores is None else significance.build_differences(scores, title)
    if table is None or table.numbers["n"].max() < 2:
        return ""
    return f"\n### Differences to {significance.BASELINE}\n\n{table.markdown}{significance.DIFFERENCES}"


def name_of(folder: Path) -> str:
    """Return the name of a folder's runs in ``results/``: its path below outputs/, or else its own name."""
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index("outputs") :] if "outputs" in parts else parts[-1:]
    return "-".join(below) or "outputs"


def results_page(home: Path) -> list[Path]:
    """Write ``docs/RESULTS.md`` and ``docs/figures`` below ``home`` from its ``results/``, and return the files.

    The text of its ``README.md`` comes first. Then come sections of papers' tables and figures, then those of other runs. A
    text without a CSV is a separate section at the end.

    Raises:
        UserError: If there are no CSVs, or if one cannot be read.
    """
    folder = home / "results"
    stored, common = {path: results.load(path) for path in folder.glob("*.csv")}, folder / "README.md"
    if not stored:
        raise UserError(f"there are no results in {folder}: python report.py --results DIR keeps a folder's runs there")
    alone = sorted({*folder.glob("*.md")} - {common, *(path.with_suffix(".md") for path in stored)})
    page, drawn = home / "docs" / "RESULTS.md", home / "docs" / "figures"
    files, parts = [page], [HEAD]
    try:
        drawn.mkdir(parents=True, exist_ok=True)
        if common.exists():
            parts.append(_words(common)[1])
        for path, runs in sorted(
            stored.items(), key=lambda item: (not any(run.published_values for run in item[1]), item[0].stem)
        ):
            text, pictures = _section(path, runs, drawn)
            parts.append(text)
            files += pictures
        parts += ["## {}\n\n{}".format(*_words(path)) for path in alone]
        page.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {home / 'docs'} ({error.strerror})") from error
    return files


def _words(path: Path) -> tuple[str, str]:
    """Return the title of a text of ``results/``, and the text below it."""
    title, _, rest = path.read_text(encoding="utf-8").strip().removeprefix("# ").partition("\n")
    return title, rest.strip() + "\n"


def _section(path: Path, stored: Sequence[FinishedRun], drawn: Path) -> tuple[str, list[Path]]:
    runs, aside = usable(stored, unfinished=True)
    words = path.with_suffix(".md")
    title, prose = _words(words) if words.exists() else (path.stem, "")
    parts = [f"## {title}\n", prose.strip() and prose, facts(runs) + "\n"]
    lone = []
    for comparison in published.compare(runs):
        ours = comparison.cells.dropna(subset=["ours"])
        if ours["method"].nunique() > 1 or ours["rank"].notna().any():
            parts += [f"### {comparison.title}\n", tables.comparison_text(comparison)]
        elif len(ours):  # a whole table for one method without ranks would hide its values
            lone.append(f"* {tables.comparison_line(comparison)}")
    if lone:
        parts.append("One method each, ours (the paper's):\n\n" + "\n".join(lone) + "\n")
    parts += ["### All runs\n", tables.runs_table(runs, title).markdown + _mixes(runs), _differences(runs, title)]
    if aside:
        parts.append("Left out: " + "; ".join(aside) + ".\n")
    pictures = []
    for stem, figure in (figures.of_runs(runs, title) | figures.of_papers(runs)).items():
        png, pdf = plots.save(figure, drawn / f"{path.stem}-{stem}")
        pictures += [png, pdf]
        parts.append(f"![{title}: {stem.replace('_', ' ')}](figures/{png.name})\n")
    return "\n".join(part for part in parts if part), pictures


def facts(runs: Sequence[FinishedRun]) -> str:
    """Return a line about all runs of a section: number, seeds, scale, machine, versions."""

    def distinct(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))

    seeds = distinct(sorted(run.summary["seed"] for run in runs))
    said = [format_count(len(runs), "run"), f"seed {seeds}"]
    for key, word in (
        ("scale", "scale="),
        ("stand_in", "stand-in: "),
        ("hardware", ""),
        ("device", "device "),
        ("commit", "commit "),
    ):
        if text := distinct([run.summary.get(key) for run in runs]):
            said.append(word + text)
    packages = ("flwr", "torch")
    nested = [run.summary.get("versions") or {} for run in runs]
    for name in packages:
        if text := distinct(
            [inner.get(name) or run.summary.get(f"versions.{name}") for inner, run in zip(nested, runs, strict=True)]
        ):
            said.append(f"{name} {text}")
    return "; ".join(said) + "."
