"""Read a table of numbers from a CSV or parquet file of the user's. Every error names the file and the first wrong cell."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core.disk import absent
from contrafed.core.errors import UserError


def find_table(key: str, path: str | None, columns: str) -> None:
    """Raise ``UserError`` if the file that ``key`` names is not there. ``columns`` says what it has."""
    if path is None:
        raise UserError(f"{key}: a trace needs a file of {columns}. Fix: {key}=FILE, CSV or parquet")
    if not Path(path).expanduser().is_file():
        raise absent(key, path)


def read_columns(key: str, path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Return columns of the file as pandas series. Those of ``optional`` may be absent.

    Raises:
        UserError: If the file cannot be read, has no rows, or lacks a column.
    """
    import pandas as pd

    try:  # parse errors of pandas and pyarrow are ValueErrors
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # raised if rows have more cells than the header has names
            csv = path.suffix.lower() not in (".parquet", ".pq")
            table = pd.read_csv(path, index_col=False) if csv else pd.read_parquet(path)
    except (OSError, ValueError, ImportError, pd.errors.ParserWarning) as error:
        raise UserError(f"{key}: cannot read {path} ({' '.join(str(error).split())})") from error
    for name in columns:
        if name not in table:
            raise UserError(f"{path} has no column '{name}'; it has: {', '.join(map(str, table.columns))}")
    if table.empty:
        raise UserError(f"{path} holds no rows")
    return {name: table[name] for name in (*columns, *optional) if name in table}


def to_whole(where: Path | str, name: str, column: Any) -> np.ndarray:
    """Return a column as int64.

    Raises:
        UserError: With the first cell that is not a whole number.
    """
    values = _to_float64(where, name, column, "whole numbers")
    wrong = ~(np.abs(values) < 2**53) | (values != np.floor(values))  # above, float64 skips whole numbers
    if wrong.any():
        raise UserError(f"{where}: {name} must be whole numbers, found {column.iloc[int(wrong.argmax())]}")
    return values.astype(np.int64)


def to_numbers(where: Path | str, name: str, column: Any) -> np.ndarray:
    """Return a column as float64. Raises ``UserError`` with the first cell that is not a finite number above 0."""
    values = _to_float64(where, name, column, "numbers above 0")
    wrong = ~(np.isfinite(values) & (values > 0))
    if wrong.any():
        raise UserError(f"{where}: {name} must be numbers above 0, found {column.iloc[int(wrong.argmax())]}")
    return values


def _to_float64(where: Path | str, name: str, column: Any, wanted: str) -> np.ndarray:
    import pandas as pd

    if column.isna().any():
        raise UserError(
            f"{where}: column '{name}' has empty cells, the first in row {int(column.isna().to_numpy().argmax()) + 1}"
        )
    if pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column):  # numbers, to pandas
        raise UserError(f"{where}: {name} must be {wanted}, found {column.iloc[0]}")
    values: np.ndarray = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64)
    return values


def check_range(where: Path | str, name: str, values: np.ndarray, low: int, high: int | None, words: str) -> None:
    """Raise ``UserError`` with the first value that is below ``low`` or above ``high``. It begins with ``where``."""
    outside = (values < low) if high is None else (values < low) | (values > high)
    if outside.any():
        raise UserError(f"{where}: {name} must be {words}, found {values[outside][0]}")


def check_clients(where: Path | str, clients: np.ndarray, num_clients: int) -> None:
    """Raise ``UserError`` with the first number that is none of a client that may train."""
    wanted = f"in 0..{num_clients - 1}, the clients that may train (held_out_clients never do)"
    check_range(where, "client", clients, 0, num_clients - 1, wanted)
