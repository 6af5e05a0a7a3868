"""trace: availability as recorded, from a CSV or parquet file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contrafed.errors import UserError
from partitions.participation.base import Participation


@dataclass(frozen=True)
class Config:
    """Settings of the pattern."""

    path: str | None
    repeat: bool


class Trace(Participation):
    """Columns ``node`` (from 0), ``round`` (from 1) and ``available`` (0 or 1); a pair that is not listed is absent.

    A run longer than the trace starts it over with ``repeat``, and otherwise finds nobody there.
    """

    everyone = False

    def prepare(self, class_proportions: Callable[[], np.ndarray]) -> None:
        """Read the file. Raises ``UserError``."""
        import pandas as pd

        path = Path(str(self.config.path)).expanduser()
        try:
            table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
        except FileNotFoundError:
            raise UserError(f"participation.path: there is no file {path}") from None
        except (OSError, ValueError) as error:  # pandas' and pyarrow's parse errors are ValueErrors
            raise UserError(f"participation.path: cannot read {path} ({' '.join(str(error).split())})") from error
        missing = [name for name in ("node", "round", "available") if name not in table]
        if missing:
            raise UserError(f"{path} has no column '{missing[0]}'; it has: {', '.join(map(str, table.columns))}")
        if table.empty:
            raise UserError(f"{path} holds no rows")
        if table[["node", "round", "available"]].isna().any().any():
            raise UserError(f"{path} has empty cells")
        node, when, here = (table[name].to_numpy() for name in ("node", "round", "available"))
        if not np.isin(here, (0, 1)).all():
            raise UserError(f"{path}: available must be 0 or 1")
        for name, values, low, high in (("node", node, 0, self.num_nodes - 1), ("round", when, 1, None)):
            if not np.issubdtype(values.dtype, np.integer) or values.min() < low or (high is not None and values.max() > high):
                bound = f"{low}..{high} (num_nodes={self.num_nodes})" if high is not None else f"at least {low}"
                raise UserError(f"{path}: {name} must be whole numbers, {bound}, found {values.min()}..{values.max()}")
        present = here.astype(bool)
        order = np.argsort(when[present], kind="stable")
        self._nodes, self._rounds = node[present][order], when[present][order]
        self._length = int(when.max())

    def available(self, server_round: int) -> np.ndarray:
        """Return which nodes are available, (K,) bool."""
        when = (server_round - 1) % self._length + 1 if self.config.repeat else server_round
        first, last = np.searchsorted(self._rounds, [when, when + 1])
        mask = np.zeros(self.num_nodes, dtype=bool)
        mask[self._nodes[first:last]] = True
        return mask
