"""Write a report for a paper: figures at the width of a column or a page, and a LaTeX table, with display names."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from contrafed.core.display_names import name_key, name_value
from contrafed.core.errors import UserError
from contrafed.report import plots, significance
from contrafed.report.beside import Beside
from contrafed.report.csv_cells import EMPTY_CELL
from contrafed.report.groups import Group, group_finished, number_of
from contrafed.report.latex import escape_tex
from contrafed.report.measures import describe_left_out
from contrafed.report.names import label_group, name_panel, name_scores
from contrafed.report.pages import describe_training
from contrafed.report.paper_figures import MAX_CURVES, MAX_PANELS, draw_paper_figure, draw_paper_ranks
from contrafed.report.runs import FinishedRun, Points, accuracy_of
from contrafed.report.statistics import over_seeds
from contrafed.report.tables import describe_scale

COLUMN_INCHES, PAGE_INCHES = 3.3, 7.0  # widths of a column and of a page of two columns
PREFIX, DPI = "paper", 300


@dataclass(frozen=True)
class Drawn:
    """A figure: its data for ``draw_paper_figure``, and its caption."""

    kind: str
    panels: Mapping[str, Mapping[Any, Any]]
    xlabel: str
    ylabel: str
    caption: str


def write_paper(runs: Sequence[FinishedRun], folder: Path, width: float, baseline: str | None = None) -> list[Path]:
    """Write figures (PDF, PNG), a LaTeX table, and ``paper.tex``, which includes all of them. Return the files.

    Args:
        runs: The runs.
        folder: The folder.
        width: Width of every figure, in inches.
        baseline: The method that others are compared with. The default is FedAvg.

    Raises:
        UserError: If the folder cannot be written, or no run is of the baseline.
    """
    found = group_finished(runs)
    if not found:
        raise UserError("--paper: no run has finished. Fix: finish one, or leave --paper out")
    about, captions = describe_data(runs, found), dict[str, str]()
    files = list[Path]()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        swept = draw_sweeps(found, runs, about)
        for name, drawn in choose_figures(found, runs, about, swept).items():
            figure = draw_paper_figure(drawn.kind, drawn.panels, drawn.xlabel, drawn.ylabel, width)
            files += plots.save(figure, folder / f"{PREFIX}-{name}", DPI)
            captions[f"{PREFIX}-{name}"] = drawn.caption
        score = validation_of(runs) if swept else None
        scores = significance.collect_scores(runs, baseline, score)
        if scores is not None:
            table = folder / f"{PREFIX}-methods.tex"
            named = name_scores(scores, found)
            remarks = [describe_left_out(found, scores.baseline) if score is None else "", describe_training(runs)]
            table.write_text(write_paper_table(named, [about, *filter(None, remarks)]), encoding="utf-8")
            files.append(table)
            if (ranking := significance.rank_scores(named)) is not None:
                files += plots.save(draw_paper_ranks(ranking, width), folder / f"{PREFIX}-ranks", DPI)
                text = significance.describe_ranking(scores, ranking)
                captions[f"{PREFIX}-ranks"] = (
                    f"{text[:1].upper()}{text[1:]}. A bar joins methods that were not found to differ."
                )
        files.append(folder / f"{PREFIX}.tex")
        files[-1].write_text(write_document(captions, scores is not None, width), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror})") from error
    return files


def describe_data(runs: Sequence[FinishedRun], found: Sequence[Group]) -> str:
    """Return what all runs have in common, for captions: data set, number of clients, and seeds of a group."""
    sets = dict.fromkeys(name_value("dataset.name", str(run.config["dataset"]["name"])) for run in runs)
    clients = sorted({int(run.config["num_clients"]) for run in runs})
    seeds, counts = {int(run.config["seed"]) for run in runs}, [len(group.runs) for group in found]
    fewest, most = min(counts), max(counts)
    spread = f"mean and standard deviation over {most if fewest == most else f'{fewest} to {most}'} seeds"
    if most == 1:
        spread = f"seed {seeds.pop()}" if len(seeds) == 1 else "one seed each"
    data = f"Data: {' and '.join(sets)}, {' or '.join(map(str, clients))} clients"
    return ", ".join(filter(None, (data, spread, describe_scale(runs))))


def choose_figures(
    found: Sequence[Group], runs: Sequence[FinishedRun], about: str, swept: Mapping[str, Drawn]
) -> dict[str, Drawn]:
    """Return {name: figure}: ``swept`` of ``draw_sweeps``, and without a heat map accuracy over rounds and of clients."""
    out = dict(swept)
    if any(drawn.kind == "heatmap" for drawn in out.values()):
        return out
    said, points = accuracy_of(runs)
    last = collect_last(found, points)

    beside = Beside(found, significance.BASELINE)
    order = _order_of(found, last, beside)
    curves, clients = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for group in sorted(found, key=lambda group: order.index(label_group(group, beside.own(group)))):
        panel, label = name_panel(beside.setting(group)), label_group(group, beside.own(group))
        curves.setdefault(panel, {})[label] = [[(t, 100 * x) for t, x in points(run)] for run in group.runs]
        if values := [100 * x for run in group.runs for x in run.last_of_clients("accuracy").values()]:
            clients.setdefault(panel, {})[label] = values
    caption = (f"{_capital(said)} over rounds", about)
    out |= _draw_parts("accuracy", "curves", curves, "round", f"{said} (%)", caption)
    caption = ("Share of clients with at most the accuracy on the x axis, after the last round", about)
    return out | _draw_parts("clients", "cdf", clients, "accuracy of a client (%)", "share of clients", caption)


def collect_last(found: Sequence[Group], points: Callable[[FinishedRun], Points]) -> dict[int, list[float]]:
    """Return {id of a group: the last accuracy of each seed, in percent}."""
    return {id(group): [100 * points(run)[-1][1] for run in group.runs if points(run)] for group in found}


def draw_sweeps(found: Sequence[Group], runs: Sequence[FinishedRun], about: str) -> dict[str, Drawn]:
    """Return {name: figure} of swept numbers, by validation data if all runs select on these."""
    said, points = validation_of(runs) or accuracy_of(runs)
    last, out = collect_last(found, points), dict[str, Drawn]()
    sweeps = find_sweeps(found, last)
    for keys, panels in sweeps.items():
        name = _name_sweep(keys, sweeps)
        if len(keys) == 2:
            caption = f"{_capital(said)} after the last round (%), by {name_key(keys[0])} and {name_key(keys[1])}. {about}."
            for number, part in _number_parts(_split(panels, MAX_PANELS)):
                out[name + number] = Drawn("heatmap", part, name_key(keys[1]), name_key(keys[0]), caption)
        else:
            text = f"{_capital(said)} after the last round, by {name_key(keys[0])}"
            out |= _draw_parts(name, "lines", panels, name_key(keys[0]), f"{said} (%)", (text, about))
    return out


def _name_sweep(keys: tuple[str, ...], every: Iterable[tuple[str, ...]]) -> str:
    """Return a figure's name with the last words of its keys, or with whole keys if another sweep has the same words."""
    words = ["-".join(key.rpartition(".")[2] for key in several) for several in every]
    own = "-".join(key.rpartition(".")[2] for key in keys)
    return f"sweep-{own if words.count(own) == 1 else '-'.join(keys).replace('.', '_')}"


def validation_of(runs: Sequence[FinishedRun]) -> tuple[str, Callable[[FinishedRun], Points]] | None:
    """Return the accuracy on validation data as ``accuracy_of`` does, None if a run does not select on these or has none."""
    for scope in ("personal", "global"):
        if all(run.selects_on_validation and run.points(scope, "validation", "accuracy") for run in runs):
            return "validation accuracy", partial(FinishedRun.points, scope=scope, split="validation", metric="accuracy")
    return None


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _order_of(found: Sequence[Group], last: Mapping[int, Sequence[float]], beside: Beside) -> list[str]:
    """Return the labels, the best mean over settings first."""
    values = dict[str, list[float]]()
    for group in found:
        values.setdefault(label_group(group, beside.own(group)), []).append(over_seeds(last[id(group)])[0])
    return sorted(values, key=lambda label: -over_seeds(values[label])[0])


def find_sweeps(
    found: Sequence[Group], last: Mapping[int, Sequence[float]]
) -> dict[tuple[str, ...], dict[str, dict[Any, Any]]]:
    """Return {one or two swept numeric keys: panels}. A method that sweeps more keys has none.

    The panels of two keys are {method and setting: {(row, column): mean}}. Those of one are {setting: {method: {x: values}}}.
    A setting has all other keys that differ between the groups. A method's own keys belong to the method (``Beside``).
    """
    out: dict[tuple[str, ...], dict[str, dict[Any, Any]]] = {}
    beside = Beside(found, significance.BASELINE)
    for method in dict.fromkeys(group.method for group in found):
        own = [group for group in found if group.method == method]
        values = {key: {dict(group.setting)[key] for group in own} - {EMPTY_CELL} for key, _ in own[0].setting}
        swept = tuple(k for k, each in values.items() if len(each) > 1 and all(math.isfinite(number_of(str(v))) for v in each))
        if len(swept) not in (1, 2):
            continue
        for group in own:
            at = dict(group.setting)
            if any(at[key] == EMPTY_CELL for key in swept):
                continue
            label = label_group(group, [pair for pair in beside.own(group) if pair[0] not in swept])
            setting = name_panel([pair for pair in beside.setting(group) if pair[0] not in swept])
            if len(swept) == 2:
                panel = ", ".join(filter(None, (label, setting)))
                out.setdefault(swept, {}).setdefault(panel, {})[at[swept[0]], at[swept[1]]] = over_seeds(last[id(group)])[0]
            else:
                line = out.setdefault(swept, {}).setdefault(setting, {}).setdefault(label, {})
                line[float(at[swept[0]])] = last[id(group)]
    return out


def _draw_parts(
    name: str, kind: str, panels: Mapping[str, Mapping[str, Any]], x: str, y: str, caption: tuple[str, str]
) -> dict[str, Drawn]:
    """Return figures of at most ``MAX_PANELS`` panels with the same ``MAX_CURVES`` labels.

    A caption is the figure's text, the only label of a figure, which has no legend, and what holds for all figures.
    """
    text, about = caption
    labels = list(dict.fromkeys(label for data in panels.values() for label in data))
    parts = []
    for start in range(0, len(labels), MAX_CURVES):
        chosen = labels[start : start + MAX_CURVES]
        shown = {panel: {label: data[label] for label in chosen if label in data} for panel, data in panels.items()}
        parts += list(_split({panel: data for panel, data in shown.items() if data}, MAX_PANELS))
    out = {}
    for number, part in _number_parts(parts):
        drawn = {label for data in part.values() for label in data}
        lone = f": {drawn.pop()}" if len(drawn) == 1 else ""
        out[name + number] = Drawn(kind, part, x, y, f"{text}{lone}. {about}.")
    return out


def _split(panels: Mapping[str, Any], most: int) -> Iterator[dict[str, Any]]:
    titles = list(panels)
    for start in range(0, len(titles), most):
        yield {title: panels[title] for title in titles[start : start + most]}


def _number_parts(parts: Any) -> list[tuple[str, Any]]:
    """Return (``-1``, part), ... The only part has no number."""
    parts = list(parts)
    return [("" if len(parts) == 1 else f"-{number}", part) for number, part in enumerate(parts, 1)]


def write_paper_table(scores: significance.Scores, remarks: Sequence[str]) -> str:
    """Return methods by settings in LaTeX, with display names. Its caption has the remarks, such as the data."""
    cells = significance.build_method_table(scores, "")
    said = [f"{_capital(scores.said)} after the last round (%)", *(remark.removesuffix(".") for remark in remarks)]
    return significance.write_latex(scores, replace(cells, title=". ".join(said)))


def write_document(captions: Mapping[str, str], has_table: bool, width: float) -> str:
    """Return a document of two columns that shows the table and every figure, to copy from."""
    kind = "figure" if width <= COLUMN_INCHES + 0.2 else "figure*"
    lines = [
        r"\documentclass[twocolumn]{article}", r"\usepackage[margin=0.7in]{geometry}", r"\usepackage{booktabs,graphicx}",
        r"\setlength{\columnsep}{0.3in}", r"\begin{document}", *([rf"\input{{{PREFIX}-methods.tex}}"] if has_table else []),
    ]  # fmt: skip
    for name, caption in captions.items():
        lines += [
            rf"\begin{{{kind}}}", r"\centering", rf"\includegraphics[width={width:g}in]{{{name}.pdf}}",
            rf"\caption{{{escape_tex(caption)}}}", rf"\label{{fig:{name}}}", rf"\end{{{kind}}}",
        ]  # fmt: skip
    return "\n".join([*lines, r"\end{document}", ""])
