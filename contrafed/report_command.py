"""Make tables and figures of finished runs.

    python report.py DIR...                  every table (Markdown, CSV, LaTeX) and figure (PNG, PDF), in DIR/report
    python report.py --paper DIR             figures of a paper's size and a LaTeX table, in DIR/report
    python report.py --as pmfl/table5 DIR... of an experiment's jobs alone, also of runs that another experiment made
    python report.py --baseline moon DIR...  differences to this method instead of FedAvg
    python report.py --list DIR...           a line on each run
    python report.py --compare A B           two runs: what their configurations differ in, their numbers side by side
    python report.py --results [DIR...]      keep folders' runs in results/, and write docs/RESULTS.md and docs/results/

Exit status: 0, or 2 for a mistake in the command line, reported in one line.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from contrafed.core.arguments import Parser, program
from contrafed.core.errors import UserError
from contrafed.core.stdio import outliving
from contrafed.runs.output.console import format_count


def parser() -> Parser:
    """Return the parser of the command line."""
    assert __doc__ is not None
    called = program("contrafed-report", "python report.py")
    text = __doc__.replace("python report.py", called)
    out = Parser(called, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("folders", nargs="*", type=Path, metavar="DIR", help="a run's folder, or one with runs somewhere below it")
    kind = out.add_mutually_exclusive_group()
    kind.add_argument("--list", action="store_true", help="a line on each run")
    kind.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two runs side by side")
    kind.add_argument("--paper", action="store_true", help="figures of a paper's size and a LaTeX table, with display names")
    kind.add_argument(
        "--results", action="store_true", help="keep runs in results/, and write docs/RESULTS.md, docs/results and docs/figures"
    )
    out.add_argument("--out", type=Path, metavar="FOLDER", help="where to write instead of DIR/report")
    width = "with --paper: the figures' width, such as 3.3 for a column (the default) or 7 for a page"
    out.add_argument("--width", type=float, metavar="INCHES", help=width)
    out.add_argument("--name", help="with --results: what results/ calls the runs; by default the folder's name")
    out.add_argument("--title", help="of tables and figures; by default the folder's name")
    target = "accuracy to count rounds and MiB to; by default the runs' target_accuracy, or FedAvg's last in the same setting"
    out.add_argument("--target", type=float, metavar="PERCENT", help=target)
    baseline = "the method that the others are compared with, seed by seed; by default fedavg, if it is among the runs"
    out.add_argument("--baseline", metavar="METHOD", help=baseline)
    out.add_argument("--unfinished", action="store_true", help="take runs that did not end as well")
    out.add_argument("--as", metavar="EXPERIMENT", help="the runs that are jobs of it, whatever ran them")
    out.add_argument("--config-dir", type=Path, metavar="DIR", help="with --as: the folder of YAMLs of your own that it is in")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for, and return the exit status."""
    with outliving():
        try:
            _report(parser().parse_args(arguments))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def _report(asked: argparse.Namespace) -> None:
    # After the command line was read: pandas and matplotlib take a second.
    from contrafed.report import pages, tables
    from contrafed.report.runs import find

    _refuse_unused(asked)
    if asked.target is not None and not 1 < asked.target <= 100:
        raise UserError(f"--target {asked.target:g} is no percentage above 1 and up to 100, such as 80")
    if asked.compare:
        pair = [find([folder]) for folder in asked.compare]
        for folder, runs in zip(asked.compare, pair, strict=True):
            if len(runs) != 1:
                raise UserError(f"--compare takes two runs, and {folder} holds {len(runs)}")
        a, b = (run for runs in pair for run in runs)
        if a.name == b.name:
            a, b = (replace(run, name=str(folder)) for run, folder in zip((a, b), asked.compare, strict=True))
        print("\n".join(f"{table.title}\n\n{table.plain}" for table in tables.compare_runs(a, b)), end="")
    elif asked.results:
        _results(asked)
    elif asked.paper and asked.folders:
        _paper(asked)
    elif not asked.folders:
        parser().error("name a folder with runs")
    elif asked.list:
        damaged: list[str] = []
        print(tables.list_runs(find(asked.folders, damaged)).plain, end="")
        _left_out(damaged)
    else:
        runs, aside = _usable(asked.folders, asked)
        folder = asked.out or asked.folders[0] / "report"
        title = asked.title or ", ".join(dict.fromkeys(map(pages.name_of, asked.folders)))
        target = None if asked.target is None else round(asked.target / 100, 12)
        files = pages.write(runs, folder, title, target, asked.baseline, aside)
        for path in (folder / "runs.md", folder / "differences.md"):
            if path in files:
                print(path.read_text(encoding="utf-8"))
        _print_files(files, runs, folder)


def _paper(asked: argparse.Namespace) -> None:
    from contrafed.report.paper import COLUMN_INCHES, write_paper

    width = COLUMN_INCHES if asked.width is None else asked.width
    if not 2 <= width <= 12:
        raise UserError(f"--width {width:g}: not a width in inches. Fix: between 2 and 12, such as 3.3 or 7")
    runs, _ = _usable(asked.folders, asked)
    folder = asked.out or asked.folders[0] / "report"
    _print_files(write_paper(runs, folder, width, asked.baseline), runs, folder)


def _print_files(files: list[Path], runs: list, folder: Path) -> None:
    names = ", ".join(path.name for path in files)
    print(f"{len(files)} files of {format_count(len(runs), 'run')} are in {folder}: {names}")


# Options of one kind of report, and the kinds that take them. A report has no kind.
KINDS_OF_OPTION: dict[str, tuple[str | None, ...]] = {
    "out": (None, "paper"), "title": (None,), "target": (None,), "baseline": (None, "paper"), "width": ("paper",),
    "name": ("results",), "as": (None, "paper", "results"),
}  # fmt: skip


def _refuse_unused(asked: argparse.Namespace) -> None:
    kind = next((name for name in ("list", "compare", "results", "paper") if getattr(asked, name)), None)
    unused = [name for name, kinds in KINDS_OF_OPTION.items() if kind not in kinds and getattr(asked, name) is not None]
    if unused:
        found = f"--{kind}" if kind else f"a report: it is for --{KINDS_OF_OPTION[unused[0]][-1]}"
        raise UserError(f"--{unused[0]} does not go with {found}")
    if asked.config_dir is not None and getattr(asked, "as") is None:
        raise UserError("--config-dir goes with --as EXPERIMENT")
    if kind == "compare" and asked.folders:
        raise UserError(f"--compare takes two runs, and nothing beside them: {asked.folders[0]}")


def _results(asked: argparse.Namespace) -> None:
    from contrafed.report import pages, results, results_pages

    if asked.name and len(asked.folders) != 1:
        raise UserError("--name goes with one folder")
    for folder in asked.folders:
        runs, _ = _usable([folder], asked)
        kept = results.keep(runs, Path("results"), asked.name or pages.name_of(folder))
        print(f"wrote {format_count(len(runs), 'run')} of {folder} to {kept}")
    files = results_pages.write_results_pages(Path())
    written = sum(path.suffix == ".md" for path in files)
    print(f"wrote {files[0]}, {format_count(written - 1, 'page')} and {len(files) - written} figures")


def _left_out(lines: list[str]) -> None:
    for line in lines:
        print(f"left out: {line}", file=sys.stderr)


def _usable(folders: list[Path], asked: argparse.Namespace) -> tuple[list, list[str]]:
    """Return the runs that are reported, and a line about each that is left out, which is also printed."""
    from contrafed.report.groups import usable
    from contrafed.report.match_experiment import match_runs
    from contrafed.report.runs import find

    damaged: list[str] = []
    found = find(folders, damaged)
    runs, aside = usable(found, unfinished=asked.unfinished)
    _left_out(damaged + aside)
    if not runs:
        more = "; --unfinished takes those that did not end" if not all(run.is_finished for run in found) else ""
        raise UserError(f"none of {format_count(len(found), 'run')} can be reported" + ("" if asked.unfinished else more))
    matching = match_runs(runs, experiment, asked.config_dir) if (experiment := getattr(asked, "as")) else runs
    return matching, damaged + aside


def command() -> None:
    """Run ``main`` and end the process with its status: the console script ``contrafed-report``."""
    sys.exit(main())
