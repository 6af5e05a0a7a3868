"""trace: recorded availability, from a CSV or parquet file."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.participation import Participation, Selection

COLUMNS = ("client", "round", "available")


@dataclass(frozen=True)
class Config(Selection):
    """Settings of the pattern."""

    path: str | None
    repeat: bool

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no such file."""
        if self.path is None:
            raise UserError("participation.path is null; a trace needs a CSV or parquet file of client, round, available")
        if not Path(self.path).expanduser().is_file():
            raise UserError(f"participation.path: there is no file {self.path}")


class Trace(Participation):
    """Read the availability from columns ``client`` (from 0), ``round`` (from 1) and ``available`` (0 or 1).

    A pair of client and round that is not listed is unavailable. The trace is as long as its largest round. After that it
    starts again with ``repeat``. Otherwise no client is available.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Read the file.

        Raises:
            UserError: If the file is not valid.
        """
        path = Path(self.config.path).expanduser()
        columns = _read(path)
        client, when, here = (_whole(path, name, columns[name]) for name in COLUMNS)
        _within(path, "client", client, 0, self.num_clients - 1, f"in 0..{self.num_clients - 1}, the clients that may train")
        _within(path, "round", when, 1, None, "at least 1")
        _within(path, "available", here, 0, 1, "0 or 1")
        order = np.lexsort((client, when))
        client, when, here = client[order], when[order], here[order] == 1
        twice = np.flatnonzero((np.diff(client) == 0) & (np.diff(when) == 0))
        if len(twice):
            raise UserError(f"{path} lists client {client[twice[0]]} in round {when[twice[0]]} more than once")
        self._clients, self._rounds = client[here], when[here]
        self._length = int(when[-1])

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        when = (server_round - 1) % self._length + 1 if self.config.repeat else server_round
        first, last = np.searchsorted(self._rounds, [when, when + 1])
        mask = np.zeros(self.num_clients, dtype=bool)
        mask[self._clients[first:last]] = True
        return mask


def _read(path: Path) -> dict[str, Any]:
    """Return the three columns of the file as pandas series."""
    import pandas as pd

    try:  # parse errors of pandas and pyarrow are ValueErrors
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # raised if rows have more cells than the header has names
            csv = path.suffix.lower() not in (".parquet", ".pq")
            table = pd.read_csv(path, index_col=False) if csv else pd.read_parquet(path)
    except (OSError, ValueError, ImportError, pd.errors.ParserWarning) as error:
        raise UserError(f"participation.path: cannot read {path} ({' '.join(str(error).split())})") from error
    for name in COLUMNS:
        if name not in table:
            raise UserError(f"{path} has no column '{name}'; it has: {', '.join(map(str, table.columns))}")
    if table.empty:
        raise UserError(f"{path} holds no rows")
    return {name: table[name] for name in COLUMNS}


def _whole(path: Path, name: str, column: Any) -> np.ndarray:
    """Return a column as int64.

    Raises:
        UserError: With the first cell that is not a whole number.
    """
    import pandas as pd

    if column.isna().any():
        raise UserError(
            f"{path}: column '{name}' has empty cells, the first in row {int(column.isna().to_numpy().argmax()) + 1}"
        )
    if pd.api.types.is_datetime64_any_dtype(column) or pd.api.types.is_timedelta64_dtype(column):  # numbers, to pandas
        raise UserError(f"{path}: {name} must be whole numbers, found {column.iloc[0]}")
    values = pd.to_numeric(column, errors="coerce").to_numpy(dtype=np.float64)
    wrong = ~(np.abs(values) < 2**53) | (values != np.floor(values))  # above, float64 skips whole numbers
    if wrong.any():
        raise UserError(f"{path}: {name} must be whole numbers, found {column.iloc[int(wrong.argmax())]}")
    return values.astype(np.int64)


def _within(path: Path, name: str, values: np.ndarray, low: int, high: int | None, words: str) -> None:
    outside = (values < low) if high is None else (values < low) | (values > high)
    if outside.any():
        raise UserError(f"{path}: {name} must be {words}, found {values[outside][0]}")
