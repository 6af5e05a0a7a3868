"""Name groups of runs, scores and tables for readers, by the names of ``display_names``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from contrafed.core.display_names import name_key, name_method, name_setting, name_value
from contrafed.report import significance
from contrafed.report.beside import Beside
from contrafed.report.csv_cells import EMPTY_CELL
from contrafed.report.groups import Group
from contrafed.report.tables import Table, find_heads


def label_group(group: Group, own: Sequence[tuple[str, Any]]) -> str:
    """Return a group's method, and these of its keys."""
    return ", ".join(filter(None, (name_method(group.method), name_panel(own))))


def name_panel(setting: Sequence[tuple[str, Any]]) -> str:
    """Return a setting as the title of a panel, without keys that the choice does not have."""
    return ", ".join(name_setting(key, str(value)) for key, value in setting if value != EMPTY_CELL)


def name_scores(scores: significance.Scores, found: Sequence[Group]) -> significance.Scores:
    """Return scores with display names for methods, keys and values."""
    beside = Beside(found, scores.baseline)
    methods, settings = dict[str, str](), dict[str, str]()
    for group in found:
        setting, own = beside.setting(group), beside.own(group)
        methods[significance.label_method(group, own)] = label_group(group, own)
        settings[significance.label_setting(setting)] = name_panel(setting)
    keys = [key for key, _ in beside.setting(found[0])]
    values = {
        settings[old]: tuple(name_value(key, value) for key, value in zip(keys, row, strict=True))
        for old, row in scores.settings.items()
    }
    table = scores.table.rename(columns=methods).rename(index=settings, level="setting")
    baseline = None if scores.baseline is None else name_method(scores.baseline)
    return replace(scores, keys=tuple(map(name_key, keys)), settings=values, table=table, baseline=baseline)


def name_table(table: Table, keys: Sequence[str]) -> Table:
    """Return a table with display names for the column ``method``, and for the heads and cells of these dotted keys."""
    named: Mapping[str, str] = {head: key for key, head in find_heads(keys).items()}

    def name_cell(head: str, cell: str) -> str:
        if head == "method":
            return name_method(cell)
        return cell if cell == EMPTY_CELL or head not in named else name_value(named[head], cell)

    rows = tuple(tuple(map(name_cell, table.heads, row)) for row in table.rows)
    heads = tuple(name_key(named[head]) if head in named else head for head in table.heads)
    return replace(table, heads=heads, rows=rows)
