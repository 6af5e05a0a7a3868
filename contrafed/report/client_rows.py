"""Select the rows of ``clients.csv`` that a report shows: those of clients that train, and scores of honest clients."""

from collections.abc import Collection, Mapping
from typing import Any

import pandas as pd

from contrafed.core.metrics import ACCURACY, FUNCTIONS
from contrafed.core.randomness import draw_attackers


def select_rows(
    clients: pd.DataFrame, config: Mapping[str, Any], metric: str, attackers: Collection[int] | None = None
) -> pd.DataFrame:
    """Return a metric's rows without held-out clients. Scores are without those of attackers, unless all clients attack.

    Args:
        clients: The rows of ``clients.csv``.
        config: The run's configuration.
        metric: The metric.
        attackers: The attackers that the summary names. None: those of the configuration.
    """
    trained = config["num_clients"] - config.get("held_out_clients", 0)
    rows = clients[(clients["metric"] == metric) & (clients["client"] < trained)]
    if metric.rpartition("/")[2].removeprefix("validation_") not in (ACCURACY, *FUNCTIONS):
        return rows
    attackers = _list_attackers(config, trained) if attackers is None else attackers
    return rows if set(range(trained)) <= set(attackers) else rows[~rows["client"].isin(attackers)]


def _list_attackers(config: Mapping[str, Any], trained: int) -> tuple[int, ...]:
    """Return the clients of a simulated attack among the first ``trained``, empty without one."""
    attack = config.get("attack") or {}
    if "fraction" not in attack:
        return ()
    if attack.get("clients") is not None:
        return tuple(attack["clients"])
    return draw_attackers(attack["fraction"], trained, config["seed"])
