"""trace: recorded availability, from a CSV or parquet file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.participation import Participation, Selection
from contrafed.data.table_file import check_clients, check_range, find_table, read_columns, to_whole

COLUMNS = ("client", "round", "available")


@dataclass(frozen=True)
class Config(Selection):
    """Settings of the pattern."""

    path: str | None
    repeat: bool

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no such file."""
        find_table("participation.path", self.path, ", ".join(COLUMNS))


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
        columns = read_columns("participation.path", path, COLUMNS)
        client, when, here = (to_whole(path, name, columns[name]) for name in COLUMNS)
        check_clients(path, client, self.num_clients)
        check_range(path, "round", when, 1, None, "at least 1")
        check_range(path, "available", here, 0, 1, "0 or 1")
        order = np.lexsort((client, when))
        client, when, here = client[order], when[order], here[order] == 1
        twice = np.flatnonzero((np.diff(client) == 0) & (np.diff(when) == 0))
        if len(twice):
            raise UserError(f"{path} lists client {client[twice[0]]} in round {when[twice[0]]} more than once")
        self._clients, self._rounds = client[here], when[here]
        self._length = int(when[-1])

    @property
    def num_never_available(self) -> int:
        """The number of clients that the file lists in no round as available."""
        return self.num_clients - len(np.unique(self._clients))

    def available(self, server_round: int) -> np.ndarray:
        """Return a mask (K,) of the available clients."""
        when = (server_round - 1) % self._length + 1 if self.config.repeat else server_round
        first, last = np.searchsorted(self._rounds, [when, when + 1])
        mask = np.zeros(self.num_clients, dtype=bool)
        mask[self._clients[first:last]] = True
        return mask
