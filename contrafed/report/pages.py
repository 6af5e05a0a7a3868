"""Write reports: a folder of tables and figures, and the table and figure of a sweep."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from contrafed.config.fairness import describe_differing_training, find_differing_training
from contrafed.core.errors import UserError
from contrafed.report import figures, plots, published, significance, tables
from contrafed.report.groups import describe_mixes, group_finished, group_runs, usable
from contrafed.report.measures import describe_left_out
from contrafed.report.names import name_scores
from contrafed.report.rank_diagram import draw_rank_diagram
from contrafed.report.runs import FinishedRun, accuracy_of, find
from contrafed.report.tables import Table


def write(
    runs: Sequence[FinishedRun], folder: Path, title: str, target: float | None = None, baseline: str | None = None,
    aside: Sequence[str] = (),
) -> list[Path]:  # fmt: skip
    """Write every table (Markdown, CSV, LaTeX) and figure (PNG, PDF) of these runs, and return the files.

    Args:
        runs: The runs.
        folder: The folder.
        title: Title of the tables and figures.
        target: Accuracy, as a fraction, to which rounds and MiB are counted. The default is the runs' ``target_accuracy``, or
            FedAvg's last accuracy in a row's setting.
        baseline: The method that others are compared with. The default is FedAvg.
        aside: A line about each run that is left out.

    Raises:
        UserError: If the folder cannot be written, or no run is of the baseline.
    """
    found: dict[str, tuple[Table, str, str]] = {}
    title = tables.format_title(runs, title)
    every = tables.runs_table(runs, title, target)
    text = every.markdown + tables.READ + format_mixes(runs, baseline) + format_selection(runs) + format_left_out(aside)
    found["runs"] = (every, text, every.latex)
    for comparison in published.compare(runs):
        text, latex = tables.comparison_text(comparison), tables.comparison_latex(comparison)
        found[comparison.stem] = (tables.comparison_table(comparison), text, latex)
    drawn = figures.of_runs(runs, title) | figures.of_papers(runs)
    if (scores := significance.collect_scores(runs, baseline)) is not None:
        found |= significance.build_tables(scores, title)
        named = name_scores(scores, group_finished(runs))
        if (ranking := significance.rank_scores(named)) is not None:
            drawn["ranks"] = draw_rank_diagram(ranking, f"{title}: {significance.describe_ranking(named, ranking)}")
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
        text = f"# {title}\n\n{table.markdown}{tables.READ}{format_mixes(found)}{format_selection(found)}"
        text += format_left_out(aside) + format_differences(found, title)
        (folder / "sweep.md").write_text(text, encoding="utf-8")
        (folder / "sweep.csv").write_text(table.csv, encoding="utf-8")
        plots.save(figures.accuracy(*figures.quiet(group_runs(found), title), *accuracy_of(found)), folder / "sweep")
    except (UserError, OSError) as error:
        print(f"no table of the sweep: {error}", flush=True)
    else:
        print(f"a table and a figure of {len(found)} runs are in {folder}: sweep.md, sweep.png", flush=True)


def format_mixes(runs: Sequence[FinishedRun], baseline: str | None = None) -> str:
    """Return paragraphs about the table of runs: rows whose runs are not alike, what is not compared, and other training."""
    found = group_runs(runs)
    left_out = describe_left_out(found, baseline or significance.BASELINE)
    return join_remarks(describe_mixes(found), left_out, describe_training(runs))


def format_left_out(aside: Sequence[str]) -> str:
    """Return a list of the runs that are left out, empty without any."""
    return "\nLeft out:\n\n" + "".join(f"* {line}\n" for line in aside) if aside else ""


def describe_training(runs: Sequence[FinishedRun]) -> str:
    """Return a sentence about training settings that differ between methods, empty if none do."""
    return describe_differing_training(find_differing_training((run.method, run.config) for run in runs))


def join_remarks(*lines: str) -> str:
    """Return a paragraph for each line that is not empty."""
    return "".join(f"\n{line}\n" for line in lines if line)


def format_selection(runs: Sequence[FinishedRun]) -> str:
    """Return a paragraph about the data that the best evaluations are selected on. It is empty if all are test data."""
    on = Counter("validation" if run.selects_on_validation else "test" for run in runs)
    if not on["validation"]:
        return ""
    share = "" if not on["test"] else f" of {on['validation']} of {len(runs)} runs"
    rest = "" if not on["test"] else " Those of the others are selected on test data."
    return f"\nThe best evaluations{share} are selected on validation data, and their accuracy is on test data.{rest}\n"


def format_differences(runs: Sequence[FinishedRun], title: str, *, named: bool = False) -> str:
    """Return the differences to FedAvg as a section. It is empty if no method has two seeds in common with it.

    Args:
        runs: The runs.
        title: Title of the table.
        named: Show display names instead of keys, and before the differences methods by settings.
    """
    scores = significance.collect_scores(runs)
    if scores is not None and named:
        scores = name_scores(scores, group_finished(runs))
    table = None if scores is None else significance.build_differences(scores, title)
    if scores is None or table is None or table.numbers["n"].max() < 2:
        return ""
    means = ""
    if named:
        cells = significance.build_method_table(scores, title)
        said = cells.title.removeprefix(f"{title}: ").capitalize()
        means = f"\n### Methods by setting\n\n{said}.\n\n{cells.markdown}{significance.BOLD}"
    said, unpaired = f"By {scores.said} after the last round.", significance.describe_unpaired(scores)
    return f"{means}\n### Differences to {scores.baseline}\n\n{said}\n\n{table.markdown}{significance.DIFFERENCES}{unpaired}"


def name_of(folder: Path) -> str:
    """Return the name of a folder's runs in ``results/``: its path below outputs/, or else its own name."""
    parts = folder.resolve().parts
    below = parts[len(parts) - parts[::-1].index("outputs") :] if "outputs" in parts else parts[-1:]
    return "-".join(below) or "outputs"
