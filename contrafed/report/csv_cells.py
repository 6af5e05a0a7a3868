"""Keep text in CSVs from being run as a formula by a spreadsheet."""

import re
from collections.abc import Callable
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

# A spreadsheet runs a cell that begins with one of the characters. An apostrophe before it prevents that.
FORMULA = re.compile(r"'*[=+\-@\t\r]")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|-?inf", re.IGNORECASE)
EMPTY_CELL = "-"


def escape_cell(cell: Any) -> Any:
    """Return a cell that no spreadsheet runs. Text that begins as a formula gets an apostrophe before it."""
    return f"'{cell}" if isinstance(cell, str) and _is_formula(cell) else cell


def unescape_cell(cell: Any) -> Any:
    """Return the cell that ``escape_cell`` was given."""
    return cell[1:] if isinstance(cell, str) and cell.startswith("'") and _is_formula(cell[1:]) else cell


def escape_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with every text in it escaped, heads included."""
    return _change_texts(table, escape_cell)


def unescape_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table that ``escape_table`` was given."""
    return _change_texts(table, unescape_cell)


def _change_texts(table: pd.DataFrame, change: Callable[[Any], Any]) -> pd.DataFrame:
    out = table.rename(columns=change)
    for place in range(out.shape[1]):  # names of columns may repeat
        if not is_numeric_dtype(column := out.iloc[:, place]):
            out.isetitem(place, column.map(change))
    return out


def _is_formula(cell: str) -> bool:
    return FORMULA.match(cell) is not None and cell != EMPTY_CELL and NUMBER.fullmatch(cell) is None
