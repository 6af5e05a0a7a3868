"""trace: recorded speeds, from a CSV or parquet file."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contrafed.core.errors import UserError
from contrafed.data.clock import Clock, Speeds
from contrafed.data.table_file import check_clients, check_range, find_table, read_columns, to_numbers, to_whole

SPEEDS = ("step_seconds", "bandwidth_down", "bandwidth_up")


@dataclass(frozen=True)
class Config:
    """Settings of the clock."""

    path: str | None

    def __post_init__(self) -> None:
        """Raise ``UserError`` if there is no such file."""
        find_table("clock.path", self.path, f"client, {', '.join(SPEEDS)}")


class Trace(Clock):
    """Read columns ``client`` (from 0), ``step_seconds``, ``bandwidth_down`` and ``bandwidth_up`` (bytes per second).

    With a column ``round`` (from 1) a row holds from its round until the client's next row. Each client has a row of round 1.
    """

    def prepare(self) -> None:
        """Read the file.

        Raises:
            UserError: If the file is not valid.
        """
        path = Path(self.config.path).expanduser()
        table, where = read_columns("clock.path", path, ("client", *SPEEDS), ("round",)), f"clock.path: {path}"
        client = to_whole(where, "client", table["client"])
        check_clients(where, client, self.num_clients)
        first = to_whole(where, "round", table["round"]) if "round" in table else np.ones_like(client)
        check_range(where, "round", first, 1, None, "at least 1")
        order = np.lexsort((first, client))
        self.client, self.first = client[order], first[order]
        twice = np.flatnonzero((np.diff(self.client) == 0) & (np.diff(self.first) == 0))
        if len(twice):
            row = f"client {self.client[twice[0]]} in round {self.first[twice[0]]}"
            raise UserError(f"{where} lists {row} more than once. Fix: keep one row")
        missing = np.setdiff1d(np.arange(self.num_clients), self.client[self.first == 1])
        if len(missing):
            raise UserError(f"{where} has no client {missing[0]} in round 1. Fix: a row for each of {self.num_clients} clients")
        self.values = Speeds(*(to_numbers(where, name, table[name])[order] for name in SPEEDS))
        self.start = np.searchsorted(self.client, np.arange(self.num_clients))  # each client's row of round 1

    def speeds(self, clients: np.ndarray, server_round: int) -> Speeds:
        """Return the speeds of ``clients`` (m,) in a round: those of each client's last row up to it."""
        counts = np.bincount(self.client[self.first <= server_round], minlength=self.num_clients)
        rows = self.start[clients] + counts[clients] - 1
        return Speeds(*(values[rows] for values in self.values))
